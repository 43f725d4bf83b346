"""Collective events, their observers, and the guard by which each event is reported once.

A collective may pass several hooks on its way to a kernel: the process group's method, the op,
c10d's kernel. The first hook reports it to the observers; `REENTRANCY` silences those below.

Observers may also be notified when the call has returned to the program. A call of
`torch.distributed` that blocks returns when the function has waited for the work that its op has
returned: `report_wait` is called then.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from functools import cache
from inspect import unwrap
from types import CodeType
from typing import Any, Protocol, cast, final

import torch
import torch.distributed as dist

from shardscope._torch.collectives.schema import (
    BATCH,
    UNREAD,
    CollectiveCall,
    OpLayout,
    read_call,
    split_batch,
)
from shardscope._torch.private import find_name


@final
class CollectiveEvent:
    """A collective op and its arguments. Reading them takes time: `read()` does it on demand.

    `is_async` says that the program goes on when the op returns, and does not wait for its result
    before; None where the arguments do not tell.
    """

    __slots__ = ("args", "is_async", "layout", "op", "out")

    def __init__(
        self,
        op: str,
        layout: OpLayout,
        args: tuple[Any, ...],
        out: Any = None,
        *,
        is_async: bool | None = True,
    ) -> None:
        self.op = op
        self.layout = layout
        self.args = args
        self.out = out
        self.is_async = is_async

    def read(self) -> CollectiveCall:
        """The kind, group and tensors, read from the arguments."""
        return read_call(self.op, self.layout, self.args, self.out)

    def argument(self, name: str) -> Any:
        """The argument of this name in the schema of an op of c10d; None if there is none."""
        position = _find_position(self.op, name)
        if position is None or position >= len(self.args):
            return None
        return self.args[position]

    def singles(self) -> Sequence[CollectiveEvent]:
        """The event itself, or one for each send and receive of a batch; empty if unreadable."""
        if self.layout is UNREAD:
            return ()
        if self.layout is not BATCH:
            return (self,)
        return [CollectiveEvent(self.op, layout, args) for layout, args in split_batch(self.args)]


@cache
def _find_position(op: str, name: str) -> int | None:
    namespace, _, op_name = op.partition(".")
    packet = getattr(torch.ops.c10d, op_name, None) if namespace == "c10d" else None
    if packet is None:
        return None
    names = [argument.name for argument in packet.default._schema.arguments]
    return names.index(name) if name in names else None


class Observer(Protocol):
    """Called before every collective."""

    def before(self, event: CollectiveEvent) -> object:
        """The collective is about to be issued; raising an exception prevents it.

        If it returns anything but None, this is a `ReturnObserver`, which gets it in `after`.
        """


class ReturnObserver(Observer, Protocol):
    """An observer that is also notified when the call has returned to the program."""

    def after(self, noted: Any) -> None:
        """The call for which `before` has returned `noted` has returned. Must not raise."""


class ResultTransform(Observer, Protocol):
    """An observer that also changes the result of a collective."""

    def amend(self, event: CollectiveEvent, result: Any) -> Any:
        """The value that the caller gets instead of `result`."""


_Awaited = tuple[tuple[ReturnObserver, Any], ...]  # with what `before` returned


class _Reentrancy(threading.local):
    depth = 0  # 1 inside a collective that was reported
    is_forced = False  # the hook key was included by `force_hook_key`
    unfinished: _Awaited = ()  # the last op has returned, and its caller waits for the result


@final
class _Observers:
    """Observers, and those that transform results: replaced in a single assignment, for threads."""

    def __init__(self) -> None:
        self.current: tuple[tuple[Observer, ...], tuple[ResultTransform, ...]] = ((), ())

    def set(self, observers: tuple[Observer, ...]) -> None:
        transforms = (
            cast(ResultTransform, observer) for observer in observers if hasattr(observer, "amend")
        )
        self.current = observers, tuple(transforms)


OBSERVERS = _Observers()
REENTRANCY = _Reentrancy()


def issue(
    event: CollectiveEvent, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Report a collective to the observers, then issue it by `call`, without reporting it again."""
    observers, transforms = OBSERVERS.current
    awaited: _Awaited = ()
    for observer in observers:
        noted = observer.before(event)
        if noted is not None:
            awaited = (*awaited, (cast(ReturnObserver, observer), noted))
    REENTRANCY.depth = 1
    try:
        result = call(*args, **kwargs)
    finally:
        REENTRANCY.depth = 0
    REENTRANCY.unfinished = ()
    if awaited:
        _report_return(event, result, awaited)
    for transform in () if event.layout is UNREAD else transforms:
        result = transform.amend(event, result)
    return result


_TRANSFERS = ("c10d.send", "c10d.recv_", "c10d.recv_any_source_")
_BLOCKING_TRANSFERS = tuple(unwrap(function).__code__ for function in (dist.send, dist.recv))
_MAX_FRAMES = 8  # from `issue` to the function of torch.distributed that was called
# Its functions wait for the work of an op, which the program does not see then.
_API_FILE = unwrap(dist.all_reduce).__code__.co_filename


def _report_return(event: CollectiveEvent, result: Any, awaited: _Awaited) -> None:
    """Notify observers of a call that has returned; of one that blocks, when its wait is over."""
    is_async = event.is_async
    if is_async is None and event.op in _TRANSFERS:
        is_async = not _is_called_by(_BLOCKING_TRANSFERS)
    if is_async is None:
        return
    work = result[-1] if type(result) in (tuple, list) and result else result
    if is_async or work is None:  # None: the backend has done all that the caller would wait for
        for observer, noted in awaited:
            observer.after(noted)
    else:
        REENTRANCY.unfinished = awaited


def _is_called_by(codes: tuple[CodeType, ...]) -> bool:
    frame = sys._getframe(2)
    for _ in range(_MAX_FRAMES):
        if frame.f_back is None:
            return False
        frame = frame.f_back
        if any(frame.f_code is code for code in codes):
            return True
    return False


def report_wait(caller: CodeType) -> None:
    """Report that a wait for the work of the last op has ended, in a function with this code."""
    awaited = REENTRANCY.unfinished
    if awaited and caller.co_filename == _API_FILE:
        REENTRANCY.unfinished = ()
        for observer, noted in awaited:
            observer.after(noted)


_NEED = "distinguish tracing a graph from running it"

_compile_context = find_name("torch._guards.CompileContext.try_get", _NEED)
_tracing_context = find_name("torch._guards.TracingContext.try_get", _NEED)
_dispatch_mode = find_name("torch._C._get_dispatch_mode", _NEED)
_PROXY = find_name("torch._C._TorchDispatchModeKey.PROXY", _NEED)
_FUNCTIONAL = find_name("torch._C._TorchDispatchModeKey.FUNCTIONAL", _NEED)

NEEDED_TO_ISSUE = (_compile_context, _tracing_context, _dispatch_mode, _PROXY, _FUNCTIONAL)
"""Private names that every hook requires."""


def is_tracing() -> bool:
    """Whether torch is tracing a graph: ops that are dispatched then are not issued."""
    return (
        _compile_context() is not None
        or _tracing_context() is not None
        or _dispatch_mode(_PROXY) is not None
        or _dispatch_mode(_FUNCTIONAL) is not None
    )
