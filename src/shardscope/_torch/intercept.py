"""Every collective of this process, shown to observers before it is issued.

Two doors, neither of which an ordinary op passes, so ordinary ops pay nothing:
- the way to the kernels of `c10d::*`, for eager calls, C++ code (DDP's reducer), other threads;
- the callables behind `torch.ops` for functional and symmetric-memory ops, for tensors without
  data, which get no further.
An op that calls another on its way is one collective, under the name of the outermost.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from sys import _getframe
from types import FrameType
from typing import Any, Protocol, cast, final

import torch
import torch.distributed._symmetric_memory
import torch.distributed.tensor  # registers _dtensor ops
import torch.fx
from torch._guards import CompileContext, TracingContext
from torch.jit._builtins import _register_builtin
from torch.library import Library

from shardscope._torch.calls import BATCH, OPS, CollectiveCall, OpLayout, read_call, split_batch
from shardscope._torch.dispatch import has_fakes
from shardscope._torch.uncompiled import keep_uncompiled

__all__ = ["Issued", "Observer", "intercept"]

# The last stop of a call before the kernels of all devices.
_KERNELS = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)
_META = torch._C.DispatchKey.Meta
_Tensor = torch.Tensor
_num_modes = torch._C._len_torch_dispatch_stack


@final
class Issued:
    """A collective as an op was called for it. Reading it takes time: `read()` when needed.

    `caller` is the frame that called the op, where that is not the one that called the door.
    """

    __slots__ = ("args", "caller", "layout", "op", "out")

    def __init__(
        self,
        op: str,
        layout: OpLayout,
        args: tuple[Any, ...],
        out: Any = None,
        caller: FrameType | None = None,
    ) -> None:
        self.op = op
        self.layout = layout
        self.args = args
        self.out = out
        self.caller = caller

    def read(self) -> CollectiveCall:
        """What the arguments say."""
        return read_call(self.op, self.layout, self.args, self.out)

    def singles(self) -> Sequence[Issued]:
        """This collective, or each of those that a batch stands for."""
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


# What a Python door leaves for the kernel's: itself, what it was called with, and by whom.
_Outer = tuple["_PythonDoor", tuple[Any, ...], dict[str, Any], FrameType]


class _Inside(threading.local):
    depth = 0  # within a collective that has been shown
    outer: _Outer | None = None  # not yet shown


# Observers, and those of them that amend: one object, so that a thread never sees half a change.
_audience: tuple[tuple[Observer, ...], tuple[Amender, ...]] = ((), ())
_installed: ExitStack | None = None
_lock = threading.RLock()
_inside = _Inside()


@contextmanager
def intercept(observer: Observer) -> Iterator[None]:
    """Show `observer` every collective of this process, on any thread, until the context ends."""
    global _installed
    with _lock:
        if _installed is None:
            _installed = _install()
        _set_observers((*_audience[0], observer))
    try:
        yield
    finally:
        with _lock:
            _set_observers(tuple(other for other in _audience[0] if other is not observer))
            if not _audience[0] and _installed is not None:
                installed, _installed = _installed, None
                installed.close()


def _set_observers(observers: tuple[Observer, ...]) -> None:
    global _audience
    _audience = (
        observers,
        tuple(cast(Amender, one) for one in observers if hasattr(one, "amend")),
    )


def _install() -> ExitStack:
    with ExitStack() as stack:
        stack.callback(_override_kernels()._destroy)
        doors = _python_doors()
        stack.callback(_remove, doors)
        for entry, door in doors:
            door.call, entry._op = entry._op, door
        return stack.pop_all()


def _remove(doors: Sequence[tuple[Any, _PythonDoor]]) -> None:
    for entry, door in doors:
        if entry._op is door:
            entry._op = door.call


@cache
def _python_doors() -> Sequence[tuple[Any, _PythonDoor]]:
    """Each object through which Python reaches an op, with the door to put there."""
    keep_uncompiled(_PythonDoor.__call__.__code__)
    doors = []
    for namespace in ("_c10d_functional", "_c10d_functional_autograd", "_dtensor", "symm_mem"):
        for name, layout in OPS[namespace].items():
            for entry, schema in _python_entries(namespace, name):
                door = _PythonDoor(f"{namespace}.{name}", layout, schema, entry._op)
                _register_builtin(door, f"{namespace}::{name}")  # for torch.jit.script
                doors.append((entry, door))
    return doors


def _override_kernels() -> Library:
    library = Library("c10d", "IMPL")
    for name, layout in OPS["c10d"].items():
        packet = getattr(torch.ops.c10d, name, None)
        if packet is not None:
            door = _kernel_door(f"c10d.{name}", layout, packet.default)
            library.impl(name, door, "BackendSelect", with_keyset=True)
    return library


def _python_entries(namespace: str, name: str) -> list[tuple[Any, Any]]:
    """The two objects through which Python reaches an op, with the op's schema."""
    packet = getattr(getattr(torch.ops, namespace), name, None)
    if packet is None:  # this torch has no such op
        return []
    return [(packet, packet.default._schema), (packet.default, packet.default._schema)]


def _kernel_door(op: str, layout: OpLayout, overload: Any) -> Callable[..., Any]:
    # Not a kernel's call_boxed: it keeps the GIL, which a thread of gloo's may wait for meanwhile.
    call = overload.redispatch

    def door(keyset: Any, *args: Any) -> Any:
        inside = _inside
        outer = inside.outer
        if inside.depth or (outer is None and keyset.has(_META) and _is_tracing()):
            return call(keyset & _KERNELS, *args)
        inside.outer = None
        issued = Issued(op, layout, args) if outer is None else outer[0].issue(*outer[1:])
        return _issue(issued, call, (keyset & _KERNELS, *args), {})

    keep_uncompiled(door.__code__)
    return door


@final
class _PythonDoor:
    """Stands where torch keeps the callable of an op, and hashes like it: so torch hashes ops."""

    __slots__ = ("__weakref__", "_layout", "_op_name", "_positions", "_reaches_kernel", "call")

    def __init__(self, op: str, layout: OpLayout, schema: Any, call: Callable[..., Any]) -> None:
        self._op_name = op
        self._layout = layout
        self._positions = [
            (argument.name, argument.default_value)
            for argument in schema.arguments
            if not argument.kwarg_only
        ]
        self._reaches_kernel = op.startswith("_c10d_functional") and layout is not BATCH
        self.call = call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        inside = _inside
        if inside.depth or (_num_modes() and _is_up_to_a_mode()):
            return self.call(*args, **kwargs)
        if self._reaches_kernel and args and type(args[0]) is _Tensor and not args[0].is_meta:
            # Tensors with data reach the door before c10d's kernels, if any: leave it to that one.
            inside.outer = (self, args, kwargs, _getframe(1))
            try:
                return self.call(*args, **kwargs)
            finally:
                inside.outer = None
        return self._call_without_data(args, kwargs)

    def _call_without_data(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if any(isinstance(arg, torch.fx.Proxy) for arg in args):
            return self.call(*args, **kwargs)
        if _is_tracing():
            return self._trace(args, kwargs)
        return _issue(self.issue(args, kwargs), self.call, args, kwargs)

    def issue(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], caller: FrameType | None = None
    ) -> Issued:
        """The collective that the op was called for."""
        is_whole = len(args) == len(self._positions)
        positional = args if is_whole else self._positional(args, kwargs)
        return Issued(self._op_name, self._layout, positional, kwargs.get("out"), caller)

    def _trace(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Write a graph. What is tried out on fake tensors meanwhile is not issued either."""
        _inside.depth = int(has_fakes(args))
        try:
            return self.call(*args, **kwargs)
        finally:
            _inside.depth = 0

    def _positional(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """All arguments in their places, with the defaults of those left out."""
        missing = self._positions[len(args) :]
        return (*args, *(kwargs.get(name, default) for name, default in missing))

    def __hash__(self) -> int:
        return hash(self.call)

    def __eq__(self, other: object) -> bool:
        return self is other or self.call is other

    def __getattr__(self, name: str) -> Any:
        return getattr(self.call, name)


_compile_context, _tracing_context = CompileContext.try_get, TracingContext.try_get
_dispatch_mode = torch._C._get_dispatch_mode
_PROXY, _FUNCTIONAL = (
    torch._C._TorchDispatchModeKey.PROXY,
    torch._C._TorchDispatchModeKey.FUNCTIONAL,
)


def _is_tracing() -> bool:
    """Whether torch is only writing a graph: what it dispatches then is not issued."""
    return (
        _compile_context() is not None
        or _tracing_context() is not None
        or _dispatch_mode(_PROXY) is not None
        or _dispatch_mode(_FUNCTIONAL) is not None
    )


def _is_up_to_a_mode() -> bool:
    """Whether the innermost dispatch mode, if not torch's own, decides if the op is issued at all.

    Selective checkpointing answers with what it had saved; one that issues the op comes back here.
    """
    innermost = torch._C._get_dispatch_stack_at(_num_modes() - 1)
    return getattr(innermost, "_mode_key", None) is None


def _issue(
    issued: Issued, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    observers, amenders = _audience
    for observer in observers:
        observer.before(issued)
    _inside.depth = 1
    try:
        result = call(*args, **kwargs)
    finally:
        _inside.depth = 0
    for amender in amenders:
        result = amender.amend(issued, result)
    return result
