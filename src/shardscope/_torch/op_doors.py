"""Doors at the callables behind `torch.ops`, for functional and symmetric-memory collectives.

Python calls them, and so do the graphs that torch.compile makes. On tensors without data they get
no further; on others they call c10d, as the same collective. c10d's own ops, which dispatch modes
pass on, are led by the door of their kernel: within a mode they would go past it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, final

import torch
import torch.distributed.tensor  # registers _dtensor ops
import torch.fx

from shardscope._torch.calls import BATCH, OPS, UNREAD, OpLayout, unread_ops
from shardscope._torch.dispatch import has_fakes, is_up_to_a_mode
from shardscope._torch.issuing import INSIDE, Issued, is_tracing, issue
from shardscope._torch.kernel_doors import go_past, lead_by
from shardscope._torch.private import find_name, is_missing
from shardscope._torch.uncompiled import keep_uncompiled

__all__ = ["op_doors"]

# It registers its ops when it is loaded.
find_name("torch.distributed._symmetric_memory", "intercept symmetric-memory collectives")
_register_builtin = find_name(
    "torch.jit._builtins._register_builtin",
    "let torch.jit.script compile collectives inside a trace",
)

_Tensor = torch.Tensor


@contextmanager
def op_doors() -> Iterator[None]:
    """Show every collective that Python calls as an op."""
    doors = _doors()
    for entry, door in doors:
        door.call, entry._op = entry._op, door
    try:
        yield
    finally:
        for entry, door in doors:
            if entry._op is door:
                entry._op = door.call


@cache
def _doors() -> Sequence[tuple[Any, _OpDoor]]:
    """Each object through which Python reaches an op, with the door to put there."""
    for method in (_OpDoor.__call__, _OpDoor.call_past):
        keep_uncompiled(method.__code__)
    doors = []
    for namespace, ops in OPS.items():
        for name, layout in (*ops.items(), *((op, UNREAD) for op in unread_ops(namespace))):
            for entry, schema in _entries(namespace, name):
                door = _OpDoor(f"{namespace}.{name}", layout, schema, entry._op)
                if not is_missing(_register_builtin):
                    _register_builtin(door, f"{namespace}::{name}")  # for torch.jit.script
                doors.append((entry, door))
    return doors


def _entries(namespace: str, name: str) -> list[tuple[Any, Any]]:
    """The two objects through which Python reaches an op, with the op's schema."""
    packet = getattr(getattr(torch.ops, namespace), name, None)
    if packet is None:  # this torch has no such op
        return []
    return [(packet, packet.default._schema), (packet.default, packet.default._schema)]


@final
class _OpDoor:
    """Stands where torch keeps the callable of an op, and hashes like it: so torch hashes ops."""

    __slots__ = (
        "__weakref__",
        "_goes_past",
        "_is_led",
        "_layout",
        "_op_name",
        "_positions",
        "call",
    )

    def __init__(self, op: str, layout: OpLayout, schema: Any, call: Callable[..., Any]) -> None:
        self._op_name = op
        self._layout = layout
        self._positions = [
            (argument.name, argument.default_value)
            for argument in schema.arguments
            if not argument.kwarg_only
        ]
        # Their kernels do nothing on the way to c10d's that going past the door there could change.
        self._goes_past = op.startswith("_c10d_functional") and layout is not BATCH
        self._is_led = op.startswith("c10d.")
        self.call = call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._is_led:
            with lead_by():
                return self.call(*args, **kwargs)
        if INSIDE.depth or is_up_to_a_mode():
            return self.call(*args, **kwargs)
        if self._goes_past and args and type(args[0]) is _Tensor and not args[0].is_meta:
            return issue(self._issue(args, kwargs), self.call_past, args, kwargs)
        if any(isinstance(arg, torch.fx.Proxy) for arg in args):
            return self.call(*args, **kwargs)
        if is_tracing():
            return self._trace(args, kwargs)
        return issue(self._issue(args, kwargs), self.call, args, kwargs)

    def call_past(self, *args: Any, **kwargs: Any) -> Any:
        """Call the op without coming by the door of c10d's kernels again."""
        with go_past():
            return self.call(*args, **kwargs)

    def _issue(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Issued:
        """The collective that the op was called for."""
        is_whole = len(args) == len(self._positions)
        positional = args if is_whole else self._positional(args, kwargs)
        return Issued(self._op_name, self._layout, positional, kwargs.get("out"))

    def _trace(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Write a graph. What is tried out on fake tensors meanwhile is not issued either."""
        INSIDE.depth = int(has_fakes(args))
        try:
            return self.call(*args, **kwargs)
        finally:
            INSIDE.depth = 0

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
