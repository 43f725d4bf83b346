"""Writes one move between placements into one rank's program."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Protocol, final

import torch
from torch import fx

from shardscope.parallel.flow import Move
from shardscope.parallel.layouts import Layout, Seat
from shardscope.parallel.placements import (
    Partial,
    Replicate,
    Shard,
    Size,
    cut_size,
    cut_start,
    divides,
)
from shardscope.parallel.rules.local import Pen

__all__ = ["Wire", "write_move"]

_aten = torch.ops.aten


class Wire(Protocol):
    """What the ranks of an axis do together, in the dialect of the program being written.

    Collectives work along dim 0. `take` is here because its gradient is a collective.
    """

    def all_reduce(self, value: fx.Node, *, axis: int, reduction: str) -> fx.Node:
        """The sum (or maximum) over the axis, on every rank."""

    def all_gather(self, value: fx.Node, *, axis: int, is_entering: bool) -> fx.Node:
        """Every rank's value, one after the other; `is_entering` as for `enter`."""

    def reduce_scatter(self, value: fx.Node, *, axis: int) -> fx.Node:
        """The rank's piece of the sum."""

    def all_to_all(self, value: fx.Node, *, axis: int, length: Size) -> fx.Node:
        """Piece i, of that length, goes to rank i; what comes is put in the ranks' order."""

    def take(
        self, value: fx.Node, *, axis: int, dim: int, start: Size, size: Size, is_even: bool
    ) -> fx.Node:
        """The rank's piece along `dim` of a whole value; `is_even`: all ranks' are of one size."""

    def enter(self, value: fx.Node, *, axis: int) -> fx.Node:
        """A whole value for a computation in pieces: its gradients are to be summed."""


def write_move(
    move: Move, value: fx.Node, *, seat: Seat, pen: Pen, wire: Wire, is_entering: bool = False
) -> fx.Node:
    """The nodes of a move; the last one holds the value as it then lies.

    `is_entering`: a value that is put together is only used in computations in pieces.
    """
    return _Writer(move, seat, pen, wire, is_entering).write(value)


@final
class _Writer:
    def __init__(self, move: Move, seat: Seat, pen: Pen, wire: Wire, is_entering: bool) -> None:
        self._axis = move.axis
        self._num_ranks = seat.sizes[move.axis]
        self._rank = seat.coordinates[move.axis]
        self._pen = pen
        self._wire = wire
        self._is_entering = is_entering
        self._source, self._target = move.source, move.target
        self._is_truth = move.value.dtype is torch.bool
        # Cut along all other axes: what the ranks of this axis have between them.
        placements = list(move.value.placements)
        placements[move.axis] = Replicate()
        self._whole = list(Layout(move.value.shape, tuple(placements)).local_shape(seat))

    def write(self, value: fx.Node) -> fx.Node:
        match self._source, self._target:
            case Partial(reduction), Replicate():
                return self._reduce(value, reduction)
            case Partial("sum"), Shard(segments=()) as target:
                return self._scatter(value, target)
            case Partial(reduction), Shard() as target:
                return self._take(self._reduce(value, reduction), target)
            case Shard() as source, Replicate():
                return self._gather(value, source)
            case Replicate(), Shard() as target:
                return self._take(value, target)
            case Shard() as source, Shard() as target if self._can_swap(source, target):
                return self._swap(value, source.dim, target.dim)
            case Shard() as source, Shard() as target:
                return self._take(self._gather(value, source), target)
        raise AssertionError(f"there is no redistribution from {self._source} to {self._target}")

    def _reduce(self, value: fx.Node, reduction: str) -> fx.Node:
        if not self._is_truth:
            return self._wire.all_reduce(value, axis=self._axis, reduction=reduction)
        # Not every backend has a maximum of truths.
        number = self._pen.write(_aten.to.dtype, value, torch.uint8)
        whole = self._wire.all_reduce(number, axis=self._axis, reduction=reduction)
        return self._pen.write(_aten.to.dtype, whole, torch.bool)

    def _gather(self, value: fx.Node, source: Shard) -> fx.Node:
        if source.segments:
            return self._gather_segments(value, source)
        shape, dim = self._open(source)
        if source.outer != 1:
            value = self._reshape(value, self._cut(shape, dim))
        whole = self._gather_dim(value, shape, dim)
        return self._reshape(whole, self._whole) if source.outer != 1 else whole

    def _gather_dim(self, value: fx.Node, shape: Sequence[Size], dim: int) -> fx.Node:
        """Pieces of one dim of a value of `shape`; uneven ones are padded on the way."""
        size, step = shape[dim], self._step(shape[dim])
        padded = self._pad(value, shape, dim, by=self._missing(size))
        together = self._all_gather(padded)
        full = [*shape[:dim], step, *shape[dim + 1 :]]
        whole = self._bring_together(together, full, dim)
        if self._divides(size):
            return whole
        # Ops that look at memory, as view does, were traced on tensors without gaps.
        return self._contiguous(self._slice(whole, dim, 0, size))

    def _all_gather(self, value: fx.Node) -> fx.Node:
        return self._wire.all_gather(value, axis=self._axis, is_entering=self._is_entering)

    def _gather_segments(self, value: fx.Node, source: Shard) -> fx.Node:
        """Each rank sends its piece of every segment; the pieces are sorted by segment."""
        dim, pieces = source.dim, [one // self._num_ranks for one in source.segments]
        together = self._all_gather(value)
        local = [*self._whole[:dim], sum(pieces), *self._whole[dim + 1 :]]
        stacked = self._reshape(together, [self._num_ranks, *local])
        parts = []
        for start, size in zip(accumulate([0, *pieces]), pieces, strict=False):
            part = self._slice(stacked, dim + 1, start, start + size)
            shape = [*local[:dim], size, *local[dim + 1 :]]
            parts.append(self._merge(part, shape, dim))
        return self._pen.write(_aten.cat.default, parts, dim)

    def _scatter(self, value: fx.Node, target: Shard) -> fx.Node:
        shape, dim = self._open(target)
        if target.outer != 1:
            value = self._reshape(value, shape)
        size, step = shape[dim], self._step(shape[dim])
        if not self._divides(size):
            value = self._pad(value, shape, dim, by=step * self._num_ranks - size)
        sent = self._set_apart(value, [*shape[:dim], step, *shape[dim + 1 :]], dim)
        piece = self._wire.reduce_scatter(sent, axis=self._axis)
        if not self._divides(size):
            piece = self._slice(piece, dim, 0, self._local_size(size))
        return self._reshape(piece, self._closed(target)) if target.outer != 1 else piece

    def _take(self, value: fx.Node, target: Shard) -> fx.Node:
        if target.segments:
            return self._take_segments(value, target)
        shape, dim = self._open(target)
        if target.outer != 1:
            value = self._reshape(value, shape)
        piece = self._take_range(value, dim, shape[dim])
        return self._reshape(piece, self._closed(target)) if target.outer != 1 else piece

    def _take_range(
        self, value: fx.Node, dim: int, size: Size, start: int = 0, *, is_whole: bool = True
    ) -> fx.Node:
        at = self._rank * self._step(size)
        if isinstance(size, int):
            at = start + cut_start(size, self._num_ranks, self._rank)
        return self._wire.take(
            value,
            axis=self._axis,
            dim=dim,
            start=at,
            size=self._local_size(size),
            is_even=is_whole and self._divides(size),
        )

    def _take_segments(self, value: fx.Node, target: Shard) -> fx.Node:
        starts = accumulate([0, *target.segments])
        parts = [
            self._take_range(value, target.dim, size, start, is_whole=False)
            for start, size in zip(starts, target.segments, strict=False)
        ]
        return self._pen.write(_aten.cat.default, parts, target.dim)

    def _can_swap(self, source: Shard, target: Shard) -> bool:
        dims = (source.dim, target.dim)
        is_plain = source.is_plain and target.is_plain
        return is_plain and all(self._divides(self._whole[dim]) for dim in dims)

    def _swap(self, value: fx.Node, source: int, target: int) -> fx.Node:
        """From pieces of one dim to pieces of another."""
        shape = self._cut(self._cut(self._whole, source), target)
        sent = self._set_apart(value, shape, target)
        received = self._wire.all_to_all(sent, axis=self._axis, length=shape[0])
        return self._bring_together(received, shape, source)

    # Shapes and their nodes: a cut dim of n pieces is n times the piece's size.

    def _set_apart(self, value: fx.Node, piece: Sequence[Size], dim: int) -> fx.Node:
        """The n pieces of `dim`, each of shape `piece`, one after the other along dim 0."""
        if dim == 0:
            return self._contiguous(value)
        split = [*piece[:dim], self._num_ranks, *piece[dim:]]
        moved = self._permute(self._reshape(value, split), dim, 0, num_dims=len(split))
        return self._reshape(moved, [self._num_ranks * piece[0], *piece[1:]])

    def _bring_together(self, value: fx.Node, piece: Sequence[Size], dim: int) -> fx.Node:
        """n pieces of that shape along dim 0, put together along `dim`."""
        if dim == 0:
            return value
        return self._merge(self._reshape(value, [self._num_ranks, *piece]), piece, dim)

    def _merge(self, stacked: fx.Node, piece: Sequence[Size], dim: int) -> fx.Node:
        shape = [*piece[:dim], self._num_ranks * piece[dim], *piece[dim + 1 :]]
        return self._reshape(self._permute(stacked, 0, dim, num_dims=len(piece) + 1), shape)

    def _open(self, placement: Shard) -> tuple[list[Size], int]:
        """The whole shape with a dim of its own for what is cut, and that dim."""
        dim, shape = placement.dim, list(self._whole)
        if placement.outer == 1:
            return shape, dim
        shape[dim : dim + 1] = [placement.outer, _divide(shape[dim], placement.outer)]
        return shape, dim + 1

    def _closed(self, placement: Shard) -> list[Size]:
        shape = list(self._whole)
        inner = _divide(shape[placement.dim], placement.outer)
        shape[placement.dim] = placement.outer * self._local_size(inner)
        return shape

    def _cut(self, shape: Sequence[Size], dim: int) -> list[Size]:
        return [*shape[:dim], self._local_size(shape[dim]), *shape[dim + 1 :]]

    def _divides(self, size: Size) -> bool:
        return not isinstance(size, int) or divides(self._num_ranks, size)

    def _step(self, size: Size) -> Size:
        return -(-size // self._num_ranks) if isinstance(size, int) else size / self._num_ranks

    def _local_size(self, size: Size) -> Size:
        if not isinstance(size, int):
            return size / self._num_ranks
        return cut_size(size, self._num_ranks, self._rank)

    def _missing(self, size: Size) -> int:
        """By how much the rank's piece is shorter than the first rank's."""
        return int(self._step(size) - self._local_size(size)) if isinstance(size, int) else 0

    def _reshape(self, value: fx.Node, shape: Sequence[Size]) -> fx.Node:
        return self._pen.write(_aten.reshape.default, value, [self._pen.size(s) for s in shape])

    def _permute(self, value: fx.Node, source: int, target: int, *, num_dims: int) -> fx.Node:
        dims = [dim for dim in range(num_dims) if dim != source]
        dims.insert(target, source)
        return self._pen.write(_aten.permute.default, value, dims)

    def _slice(self, value: fx.Node, dim: int, start: Size, end: Size) -> fx.Node:
        return self._pen.write(_aten.slice.Tensor, value, dim, start, end)

    def _contiguous(self, value: fx.Node) -> fx.Node:
        return self._pen.write(_aten.contiguous.default, value)

    def _pad(self, value: fx.Node, shape: Sequence[Size], dim: int, *, by: Size) -> fx.Node:
        # Where pieces are uneven all ranks pad, some by nothing: their programs stay alike.
        if self._divides(shape[dim]):
            return self._contiguous(value)
        pad = [0, 0] * (len(shape) - 1 - dim) + [0, by]
        return self._contiguous(self._pen.write(_aten.constant_pad_nd.default, value, pad))


def _divide(size: Size, by: Size) -> Size:
    return size // by if isinstance(size, int) and isinstance(by, int) else size / by
