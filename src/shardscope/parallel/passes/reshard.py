"""Lowers a reshard to one rank's collectives, slices and permutations."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Protocol, final

import torch
from torch import fx

from shardscope.parallel.ir.graph import Reshard
from shardscope.parallel.ir.shard_spec import MeshCoordinate, ShardSpec
from shardscope.parallel.sharding_rules.context import GraphBuilder
from shardscope.plan.placements import (
    Partial,
    Replicate,
    Shard,
    Size,
    divides,
    shard_size,
    shard_start,
)

_aten = torch.ops.aten


class CollectiveEmitter(Protocol):
    """Writes the collectives of one rank; implementations differ in how they are differentiated.

    Collectives work along dim 0. `shard_slice` is one because its gradient is a collective.
    """

    def all_reduce(self, value: fx.Node, *, axis: int, reduction: str) -> fx.Node:
        """The sum (or maximum) over the axis, on every rank."""

    def all_gather(self, value: fx.Node, *, axis: int, has_partial_grad: bool) -> fx.Node:
        """The values of all ranks, concatenated; a partial gradient is reduce-scattered."""

    def reduce_scatter(self, value: fx.Node, *, axis: int) -> fx.Node:
        """The rank's shard of the sum."""

    def all_to_all(self, value: fx.Node, *, axis: int, length: Size) -> fx.Node:
        """Sends chunk i, of `length` rows, to rank i; returns what was received, in rank order."""

    def shard_slice(
        self, value: fx.Node, *, axis: int, dim: int, start: Size, size: Size, is_even: bool
    ) -> fx.Node:
        """The rank's shard of a replicated value along `dim`; `is_even`: all shards are equal."""

    def allreduce_grad(self, value: fx.Node, *, axis: int) -> fx.Node:
        """A replicated value that a sharded op reads: its gradient is all-reduced over the axis."""


def lower_reshard(
    reshard: Reshard,
    value: fx.Node,
    *,
    coordinate: MeshCoordinate,
    builder: GraphBuilder,
    emitter: CollectiveEmitter,
    has_partial_grad: bool = False,
) -> fx.Node:
    """Write the nodes of a reshard of `value`, and return the one in the new placement.

    `has_partial_grad`: sharded ops alone read the gathered value, so its gradient is partial.
    """
    return _ReshardLowering(reshard, coordinate, builder, emitter, has_partial_grad).write(value)


@final
class _ReshardLowering:
    """Writes one reshard for one rank. "Opened" shapes split a dim that is sharded in blocks."""

    def __init__(
        self,
        reshard: Reshard,
        coordinate: MeshCoordinate,
        builder: GraphBuilder,
        emitter: CollectiveEmitter,
        has_partial_grad: bool,
    ) -> None:
        self._axis = reshard.axis
        self._num_ranks = coordinate.sizes[reshard.axis]
        self._rank = coordinate.coordinates[reshard.axis]
        self._builder = builder
        self._emitter = emitter
        self._has_partial_grad = has_partial_grad
        self._source, self._target = reshard.source, reshard.target
        self._is_bool = reshard.value.dtype is torch.bool
        # The tensor that the ranks of this axis hold together: sharded along all other axes.
        placements = list(reshard.value.placements)
        placements[reshard.axis] = Replicate()
        self._group_shape = list(
            ShardSpec(reshard.value.shape, tuple(placements)).local_shape(coordinate)
        )

    def write(self, value: fx.Node) -> fx.Node:
        match self._source, self._target:
            case Partial(reduction), Replicate():
                return self._reduce(value, reduction)
            case Partial("sum"), Shard(segments=()) as target:
                return self._reduce_scatter(value, target)
            case Partial(reduction), Shard() as target:
                return self._slice_shard(self._reduce(value, reduction), target)
            case Shard() as source, Replicate():
                return self._gather(value, source)
            case Replicate(), Shard() as target:
                return self._slice_shard(value, target)
            case Shard() as source, Shard() as target if self._can_all_to_all(source, target):
                return self._all_to_all(value, source.dim, target.dim)
            case Shard() as source, Shard() as target:
                return self._slice_shard(self._gather(value, source), target)
        raise AssertionError(f"there is no redistribution from {self._source} to {self._target}")

    def _reduce(self, value: fx.Node, reduction: str) -> fx.Node:
        if not self._is_bool:
            return self._emitter.all_reduce(value, axis=self._axis, reduction=reduction)
        # Not every backend has max for bool.
        as_uint8 = self._builder.write(_aten.to.dtype, value, torch.uint8)
        reduced = self._emitter.all_reduce(as_uint8, axis=self._axis, reduction=reduction)
        return self._builder.write(_aten.to.dtype, reduced, torch.bool)

    def _gather(self, value: fx.Node, source: Shard) -> fx.Node:
        if source.segments:
            return self._gather_segments(value, source)
        shape, dim = self._opened_shape(source)
        if source.outer != 1:
            value = self._reshape(value, self._shard_dim(shape, dim))
        gathered = self._gather_dim(value, shape, dim)
        return self._reshape(gathered, self._group_shape) if source.outer != 1 else gathered

    def _gather_dim(self, value: fx.Node, shape: Sequence[Size], dim: int) -> fx.Node:
        """All-gather along one dim to a value of `shape`; uneven shards are padded for it."""
        size, chunk_size = shape[dim], self._chunk_size(shape[dim])
        padded = self._pad(value, shape, dim, by=self._padding(size))
        chunks = self._all_gather(padded)
        chunk_shape = [*shape[:dim], chunk_size, *shape[dim + 1 :]]
        gathered = self._join_from_front(chunks, chunk_shape, dim)
        if self._divides(size):
            return gathered
        # Ops that depend on strides, such as view, were traced on contiguous tensors.
        return self._contiguous(self._slice(gathered, dim, 0, size))

    def _all_gather(self, value: fx.Node) -> fx.Node:
        return self._emitter.all_gather(
            value, axis=self._axis, has_partial_grad=self._has_partial_grad
        )

    def _gather_segments(self, value: fx.Node, source: Shard) -> fx.Node:
        """All-gather the shards of all segments, then sort them by segment."""
        dim, sizes = source.dim, [segment // self._num_ranks for segment in source.segments]
        gathered = self._all_gather(value)
        local = [*self._group_shape[:dim], sum(sizes), *self._group_shape[dim + 1 :]]
        stacked = self._reshape(gathered, [self._num_ranks, *local])
        parts = []
        for start, size in zip(accumulate([0, *sizes]), sizes, strict=False):
            part = self._slice(stacked, dim + 1, start, start + size)
            shape = [*local[:dim], size, *local[dim + 1 :]]
            parts.append(self._merge_chunks(part, shape, dim))
        return self._builder.write(_aten.cat.default, parts, dim)

    def _reduce_scatter(self, value: fx.Node, target: Shard) -> fx.Node:
        shape, dim = self._opened_shape(target)
        if target.outer != 1:
            value = self._reshape(value, shape)
        size, chunk_size = shape[dim], self._chunk_size(shape[dim])
        if not self._divides(size):
            value = self._pad(value, shape, dim, by=chunk_size * self._num_ranks - size)
        chunks = self._split_to_front(value, [*shape[:dim], chunk_size, *shape[dim + 1 :]], dim)
        shard = self._emitter.reduce_scatter(chunks, axis=self._axis)
        if not self._divides(size):
            shard = self._slice(shard, dim, 0, self._local_size(size))
        return self._reshape(shard, self._local_shape(target)) if target.outer != 1 else shard

    def _slice_shard(self, value: fx.Node, target: Shard) -> fx.Node:
        if target.segments:
            return self._slice_segments(value, target)
        shape, dim = self._opened_shape(target)
        if target.outer != 1:
            value = self._reshape(value, shape)
        shard = self._slice_range(value, dim, shape[dim])
        return self._reshape(shard, self._local_shape(target)) if target.outer != 1 else shard

    def _slice_range(
        self, value: fx.Node, dim: int, size: Size, start: int = 0, *, is_entire_dim: bool = True
    ) -> fx.Node:
        shard_begin = self._rank * self._chunk_size(size)
        if isinstance(size, int):
            shard_begin = start + shard_start(size, self._num_ranks, self._rank)
        return self._emitter.shard_slice(
            value,
            axis=self._axis,
            dim=dim,
            start=shard_begin,
            size=self._local_size(size),
            is_even=is_entire_dim and self._divides(size),
        )

    def _slice_segments(self, value: fx.Node, target: Shard) -> fx.Node:
        starts = accumulate([0, *target.segments])
        parts = [
            self._slice_range(value, target.dim, size, start, is_entire_dim=False)
            for start, size in zip(starts, target.segments, strict=False)
        ]
        return self._builder.write(_aten.cat.default, parts, target.dim)

    def _can_all_to_all(self, source: Shard, target: Shard) -> bool:
        dims = (source.dim, target.dim)
        is_plain = source.is_plain and target.is_plain
        return is_plain and all(self._divides(self._group_shape[dim]) for dim in dims)

    def _all_to_all(self, value: fx.Node, source: int, target: int) -> fx.Node:
        """All-to-all from shards of one dim to shards of another."""
        shape = self._shard_dim(self._shard_dim(self._group_shape, source), target)
        chunks = self._split_to_front(value, shape, target)
        received = self._emitter.all_to_all(chunks, axis=self._axis, length=shape[0])
        return self._join_from_front(received, shape, source)

    # Shapes and layout: a sharded dim's size is the number of ranks times its shard's.

    def _split_to_front(self, value: fx.Node, shard_shape: Sequence[Size], dim: int) -> fx.Node:
        """Split `dim` into one shard per rank, each of `shard_shape`, concatenated along dim 0."""
        if dim == 0:
            return self._contiguous(value)
        split = [*shard_shape[:dim], self._num_ranks, *shard_shape[dim:]]
        permuted = self._permute(self._reshape(value, split), dim, 0, num_dims=len(split))
        return self._reshape(permuted, [self._num_ranks * shard_shape[0], *shard_shape[1:]])

    def _join_from_front(self, value: fx.Node, shard_shape: Sequence[Size], dim: int) -> fx.Node:
        """Concatenate along `dim` the shards of `shard_shape` that are concatenated along dim 0."""
        if dim == 0:
            return value
        return self._merge_chunks(
            self._reshape(value, [self._num_ranks, *shard_shape]), shard_shape, dim
        )

    def _merge_chunks(self, stacked: fx.Node, shard_shape: Sequence[Size], dim: int) -> fx.Node:
        shape = [*shard_shape[:dim], self._num_ranks * shard_shape[dim], *shard_shape[dim + 1 :]]
        return self._reshape(self._permute(stacked, 0, dim, num_dims=len(shard_shape) + 1), shape)

    def _opened_shape(self, placement: Shard) -> tuple[list[Size], int]:
        """The full shape, a dim that is sharded in blocks split in two, and the dim to shard."""
        dim, shape = placement.dim, list(self._group_shape)
        if placement.outer == 1:
            return shape, dim
        shape[dim : dim + 1] = [placement.outer, _divide(shape[dim], placement.outer)]
        return shape, dim + 1

    def _local_shape(self, placement: Shard) -> list[Size]:
        shape = list(self._group_shape)
        inner = _divide(shape[placement.dim], placement.outer)
        shape[placement.dim] = placement.outer * self._local_size(inner)
        return shape

    def _shard_dim(self, shape: Sequence[Size], dim: int) -> list[Size]:
        return [*shape[:dim], self._local_size(shape[dim]), *shape[dim + 1 :]]

    def _divides(self, size: Size) -> bool:
        return not isinstance(size, int) or divides(self._num_ranks, size)

    def _chunk_size(self, size: Size) -> Size:
        return -(-size // self._num_ranks) if isinstance(size, int) else size / self._num_ranks

    def _local_size(self, size: Size) -> Size:
        if not isinstance(size, int):
            return size / self._num_ranks
        return shard_size(size, self._num_ranks, self._rank)

    def _padding(self, size: Size) -> int:
        """By how much the rank's shard is shorter than the first rank's."""
        return int(self._chunk_size(size) - self._local_size(size)) if isinstance(size, int) else 0

    def _reshape(self, value: fx.Node, shape: Sequence[Size]) -> fx.Node:
        return self._builder.write(
            _aten.reshape.default, value, [self._builder.size(s) for s in shape]
        )

    def _permute(self, value: fx.Node, source: int, target: int, *, num_dims: int) -> fx.Node:
        dims = [dim for dim in range(num_dims) if dim != source]
        dims.insert(target, source)
        return self._builder.write(_aten.permute.default, value, dims)

    def _slice(self, value: fx.Node, dim: int, start: Size, end: Size) -> fx.Node:
        return self._builder.write(_aten.slice.Tensor, value, dim, start, end)

    def _contiguous(self, value: fx.Node) -> fx.Node:
        return self._builder.write(_aten.contiguous.default, value)

    def _pad(self, value: fx.Node, shape: Sequence[Size], dim: int, *, by: Size) -> fx.Node:
        # If shards are uneven all ranks pad, some by 0, so that their programs stay the same.
        if self._divides(shape[dim]):
            return self._contiguous(value)
        pad = [0, 0] * (len(shape) - 1 - dim) + [0, by]
        return self._contiguous(self._builder.write(_aten.constant_pad_nd.default, value, pad))


def _divide(size: Size, by: Size) -> Size:
    return size // by if isinstance(size, int) and isinstance(by, int) else size / by
