"""A collective on its way: who is shown it, and that each is shown but once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol, cast, final

from shardscope._torch.calls import BATCH, UNREAD, CollectiveCall, OpLayout, read_call, split_batch
from shardscope._torch.private import find_name

__all__ = ["AUDIENCE", "INSIDE", "NEEDED_TO_ISSUE", "Issued", "Observer", "is_tracing", "issue"]


@final
class Issued:
    """A collective as an op was called for it. Reading it takes time: `read()` when needed."""

    __slots__ = ("args", "layout", "op", "out")

    def __init__(self, op: str, layout: OpLayout, args: tuple[Any, ...], out: Any = None) -> None:
        self.op = op
        self.layout = layout
        self.args = args
        self.out = out

    def read(self) -> CollectiveCall:
        """What the arguments say."""
        return read_call(self.op, self.layout, self.args, self.out)

    def singles(self) -> Sequence[Issued]:
        """This collective, or each of those that a batch stands for; none of one we cannot read."""
        if self.layout is UNREAD:
            return ()
        if self.layout is not BATCH:
            return (self,)
        return [Issued(self.op, layout, args) for layout, args in split_batch(self.args)]


class Observer(Protocol):
    """Someone who wants to know of every collective."""

    def before(self, issued: Issued) -> None:
        """The collective is about to be issued; raising refuses it."""


class Amender(Observer, Protocol):
    """An observer that also changes what the caller gets."""

    def amend(self, issued: Issued, result: Any) -> Any:
        """What the caller gets instead of `result`."""


class _Inside(threading.local):
    depth = 0  # within a collective that has been shown
    is_led = False  # by a door that it would not have come by


@final
class _Audience:
    """Observers, and those of them that amend: one object, so that nobody sees half a change."""

    def __init__(self) -> None:
        self.current: tuple[tuple[Observer, ...], tuple[Amender, ...]] = ((), ())

    def set(self, observers: tuple[Observer, ...]) -> None:
        amenders = (cast(Amender, one) for one in observers if hasattr(one, "amend"))
        self.current = observers, tuple(amenders)


AUDIENCE = _Audience()
INSIDE = _Inside()


def issue(
    issued: Issued, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Show a collective, then have it issued by `call`, in which it is not shown again."""
    observers, amenders = AUDIENCE.current
    for observer in observers:
        observer.before(issued)
    INSIDE.depth = 1
    try:
        result = call(*args, **kwargs)
    finally:
        INSIDE.depth = 0
    for amender in () if issued.layout is UNREAD else amenders:
        result = amender.amend(issued, result)
    return result


_NEED = "distinguish tracing a graph from running it"

_compile_context = find_name("torch._guards.CompileContext.try_get", _NEED)
_tracing_context = find_name("torch._guards.TracingContext.try_get", _NEED)
_dispatch_mode = find_name("torch._C._get_dispatch_mode", _NEED)
_PROXY = find_name("torch._C._TorchDispatchModeKey.PROXY", _NEED)
_FUNCTIONAL = find_name("torch._C._TorchDispatchModeKey.FUNCTIONAL", _NEED)

NEEDED_TO_ISSUE = (_compile_context, _tracing_context, _dispatch_mode, _PROXY, _FUNCTIONAL)
"""Private names without which no door works."""


def is_tracing() -> bool:
    """Whether torch is only writing a graph: what it dispatches then is not issued."""
    return (
        _compile_context() is not None
        or _tracing_context() is not None
        or _dispatch_mode(_PROXY) is not None
        or _dispatch_mode(_FUNCTIONAL) is not None
    )
