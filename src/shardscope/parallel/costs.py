"""What it costs to change a placement: bytes on the wire, and what would be regretted later."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import sympy

from shardscope.parallel.flow import Value
from shardscope.parallel.layouts import Layout, Seat
from shardscope.parallel.placements import Partial, Placement, Replicate, Shard, Size, product

__all__ = ["START_BYTES", "Hints", "move_kind", "price", "size_hint", "wire_bytes"]

Hints = Mapping[Any, int]
"""The sizes that export traced an open program with."""

START_BYTES = 16 * 1024
"""What could be sent in the time that a collective takes to start."""

_GUESS = 64  # for a size that the data decide
_SLICE = 1e-6  # free, but less than whole is worth less
_REGRET = 1.01  # of pieces that nobody asked for: they must be gathered again


def size_hint(size: Size, hints: Hints) -> int:
    """A number for a size, for the sake of comparing costs."""
    if isinstance(size, int):
        return size
    known = sympy.sympify(size).subs(dict(hints))
    return int(known.subs(dict.fromkeys(known.free_symbols, _GUESS)))


def wire_bytes(value: Value, axis: int, seat: Seat, hints: Hints) -> int:
    """The bytes of a value that takes part in a move: whole along the axis, cut along others."""
    assert value.dtype is not None
    placements = [
        Replicate() if index == axis else one for index, one in enumerate(value.placements)
    ]
    sizes, at = seat.sizes[: len(placements)], seat.coordinates[: len(placements)]
    local = Layout(value.shape, tuple(placements)).local_shape(Seat(sizes, at))
    return size_hint(product(local), hints) * value.dtype.itemsize


def price(source: Placement, target: Placement, *, is_wished: bool = False) -> float:
    """The cost of a move per byte of the whole value."""
    if source == target:
        return 0.0
    match source, target:
        case _, Partial():
            return math.inf
        case Replicate(), Shard():
            return _SLICE
        case Shard(), Replicate():
            return 1.0
        case Shard(), Shard():
            return 0.5 if is_wished else 1.0 + _SLICE
        case Partial(), Replicate():
            return 2.0
        case _:  # addends to pieces
            return 1.0 if is_wished else 1.0 + _REGRET


def move_kind(source: Placement, target: Placement) -> str:
    """The collective that a move is made of, "slice" where it needs none."""
    match source, target:
        case Replicate(), Shard():
            return "slice"
        case Shard(), Replicate():
            return "all_gather"
        case Shard(), Shard():
            return "all_to_all"
        case Partial(), Shard():
            return "reduce_scatter"
        case _:
            return "all_reduce"
