"""What spellers share: a rank's piece of a whole value, and its own part of a range of indices."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import torch
from torch import fx

from shardscope.parallel.layouts import Layout, Seat
from shardscope.parallel.placements import (
    Partial,
    Replicate,
    Shard,
    Size,
    cut_size,
    cut_start,
    product,
)
from shardscope.parallel.rules.call import Call, TensorSpec
from shardscope.parallel.rules.local import Local, Pen
from shardscope.parallel.rules.terms import blocks_of

__all__ = [
    "can_pick_own",
    "count_once",
    "cut_piece",
    "is_cut",
    "local_index",
    "mask_others",
    "write_zeros",
]

aten = torch.ops.aten


def is_cut(layout: Layout, dim: int) -> bool:
    """Whether some axis cuts the dim."""
    return any(isinstance(one, Shard) and one.dim == dim for one in layout.placements)


def cut_piece(pen: Pen, whole: fx.Node, *, layout: Layout, seat: Seat) -> fx.Node:
    """The rank's piece of a value of which it holds the whole."""
    shape = list(layout.shape)
    for placement, num_ranks, rank in zip(
        layout.placements, seat.sizes, seat.coordinates, strict=True
    ):
        if isinstance(placement, Shard):
            whole = _cut_along_axis(pen, whole, shape, placement, (num_ranks, rank))
            part = Layout(tuple(shape), (placement,)).local_shape(Seat((num_ranks,), (rank,)))
            shape[placement.dim] = part[placement.dim]
    return whole


def _cut_along_axis(
    pen: Pen, whole: fx.Node, shape: list[Size], cut: Shard, place: tuple[int, int]
) -> fx.Node:
    dim, size = cut.dim, shape[cut.dim]
    if cut.is_plain:
        return _slice(pen, whole, dim, *_range(size, *place))
    if cut.segments:
        blocks = pen.write(aten.split_with_sizes.default, whole, list(cut.segments), dim)
        parts = [
            _slice(pen, pen.item(blocks, index), dim, *_range(one, *place))
            for index, one in enumerate(cut.segments)
        ]
        return pen.write(aten.cat.default, parts, dim)
    block = size // cut.outer if isinstance(size, int) else size / cut.outer
    before, after = ([pen.size(one) for one in part] for part in (shape[:dim], shape[dim + 1 :]))
    shape_in_blocks = [*before, pen.size(cut.outer), pen.size(block), *after]
    parts_in_blocks = _slice(
        pen,
        pen.write(aten.reshape.default, whole, shape_in_blocks),
        dim + 1,
        *_range(block, *place),
    )
    return pen.write(aten.flatten.using_ints, parts_in_blocks, dim, dim + 1)


def _range(size: Size, num_ranks: int, rank: int) -> tuple[Size, Size]:
    if isinstance(size, int):
        start = cut_start(size, num_ranks, rank)
        return start, start + cut_size(size, num_ranks, rank)
    return size / num_ranks * rank, size / num_ranks * (rank + 1)  # open sizes divide


def _slice(pen: Pen, value: fx.Node, dim: int, start: Size, end: Size) -> fx.Node:
    return pen.write(aten.slice.Tensor, value, dim, pen.size(start), pen.size(end))


def local_index(layout: Layout, dim: int, *, index: int, seat: Seat) -> int:
    """Where a boundary between blocks of the whole dim lies in the rank's piece of it."""
    size = layout.shape[dim]
    for cut, num_ranks, rank in zip(layout.placements, seat.sizes, seat.coordinates, strict=True):
        if isinstance(cut, Shard) and cut.dim == dim:
            blocks = blocks_of(cut, size)
            assert blocks is not None
            before = [0, *accumulate(blocks)].index(index)
            parts = [cut_size(one, num_ranks, rank) for one in blocks]
            index, size = sum(parts[:before]), sum(parts)
    return index


def can_pick_own(call: Call, dim: int) -> bool:
    """Whether to fill each place of the result on the rank that holds it, with zeros elsewhere.

    Not where so much is picked that to gather what it is picked from costs less than the sum.
    """
    source: TensorSpec = call["self"]
    if source.dtype == torch.bool or not isinstance(source.shape[dim], int):
        return False
    picked, whole = product(call.outputs[0].shape), product(source.shape)
    growth = 2 * picked - whole
    return not bool(growth > 0 if isinstance(growth, int) else growth.is_positive)


def count_once(local: Local, name: str) -> fx.Node:
    """A whole argument of a result in addends: it counts on the first rank alone."""
    layout = local.input_layout(name)
    axes = zip(layout.placements, local.outputs[0].placements, local.seat.coordinates, strict=True)
    is_elsewhere = any(
        isinstance(ours, Replicate) and isinstance(result, Partial) and rank > 0
        for ours, result, rank in axes
    )
    given: fx.Node = local[name]
    return write_zeros(local, given) if is_elsewhere else given


def mask_others(local: Local, index: fx.Node, *, layout: Layout, dim: int) -> tuple[Any, Any]:
    """Indices into a whole dim as indices into the rank's piece, and which are not its own.

    Those become 0, so the piece must not be empty.
    """
    start, size = layout.start(dim, local.seat), layout.local_shape(local.seat)[dim]
    write = local.pen.write
    own = write(aten.sub.Scalar, index, start)
    is_others = write(
        aten.logical_or.default,
        write(aten.lt.Scalar, own, 0),
        write(aten.ge.Scalar, own, size),
    )
    return write(aten.masked_fill.Scalar, own, is_others, 0), is_others


def write_zeros(local: Local, like: fx.Node) -> fx.Node:
    """Zeros of the output's shape that still depend on `like`, so that it has a gradient: zero."""
    write, dtype = local.pen.write, local.call.outputs[0].dtype
    nothing = write(aten.slice.Tensor, write(aten.reshape.default, like, [-1]), 0, 0, 0)
    zero = write(aten.sum.dim_IntList, nothing, [0], dtype=dtype)
    return write(aten.expand.default, zero, local.output_shape())
