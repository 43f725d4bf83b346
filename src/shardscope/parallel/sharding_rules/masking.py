"""Helpers of lowerings: slice a rank's shard from a full tensor, and convert global indices to
local ones.
"""

from __future__ import annotations

from itertools import accumulate

import torch
from torch import fx

from shardscope.parallel.ir.shard_spec import MeshCoordinate, ShardSpec
from shardscope.parallel.sharding_rules.builders import blocks_of
from shardscope.parallel.sharding_rules.context import GraphBuilder, LoweringContext, OpCall
from shardscope.plan.placements import (
    Partial,
    Replicate,
    Shard,
    Size,
    product,
    shard_size,
    shard_start,
)

aten = torch.ops.aten


def is_sharded(spec: ShardSpec, dim: int) -> bool:
    """Whether any axis shards the dim."""
    return any(
        isinstance(placement, Shard) and placement.dim == dim for placement in spec.placements
    )


def slice_shard(
    builder: GraphBuilder, value: fx.Node, *, spec: ShardSpec, coordinate: MeshCoordinate
) -> fx.Node:
    """The rank's shard of a value that it holds in full."""
    shape = list(spec.shape)
    for placement, num_ranks, rank in zip(
        spec.placements, coordinate.sizes, coordinate.coordinates, strict=True
    ):
        if isinstance(placement, Shard):
            value = _slice_along_axis(builder, value, shape, placement, (num_ranks, rank))
            local_shape = ShardSpec(tuple(shape), (placement,)).local_shape(
                MeshCoordinate((num_ranks,), (rank,))
            )
            shape[placement.dim] = local_shape[placement.dim]
    return value


def _slice_along_axis(
    builder: GraphBuilder,
    value: fx.Node,
    shape: list[Size],
    shard: Shard,
    ranks_and_rank: tuple[int, int],
) -> fx.Node:
    dim, size = shard.dim, shape[shard.dim]
    if shard.is_plain:
        return _slice(builder, value, dim, *_shard_range(size, *ranks_and_rank))
    if shard.segments:
        blocks = builder.write(aten.split_with_sizes.default, value, list(shard.segments), dim)
        parts = [
            _slice(
                builder, builder.item(blocks, index), dim, *_shard_range(segment, *ranks_and_rank)
            )
            for index, segment in enumerate(shard.segments)
        ]
        return builder.write(aten.cat.default, parts, dim)
    block = size // shard.outer if isinstance(size, int) else size / shard.outer
    before, after = (
        [builder.size(size_before) for size_before in sizes]
        for sizes in (shape[:dim], shape[dim + 1 :])
    )
    shape_in_blocks = [*before, builder.size(shard.outer), builder.size(block), *after]
    parts_in_blocks = _slice(
        builder,
        builder.write(aten.reshape.default, value, shape_in_blocks),
        dim + 1,
        *_shard_range(block, *ranks_and_rank),
    )
    return builder.write(aten.flatten.using_ints, parts_in_blocks, dim, dim + 1)


def _shard_range(size: Size, num_ranks: int, rank: int) -> tuple[Size, Size]:
    if isinstance(size, int):
        start = shard_start(size, num_ranks, rank)
        return start, start + shard_size(size, num_ranks, rank)
    return size / num_ranks * rank, size / num_ranks * (rank + 1)  # symbolic sizes divide evenly


def _slice(builder: GraphBuilder, value: fx.Node, dim: int, start: Size, end: Size) -> fx.Node:
    return builder.write(aten.slice.Tensor, value, dim, builder.size(start), builder.size(end))


def local_index(spec: ShardSpec, dim: int, *, index: int, coordinate: MeshCoordinate) -> int:
    """Where a boundary between blocks of the full dim, at `index`, is in the rank's shard."""
    size = spec.shape[dim]
    for placement, num_ranks, rank in zip(
        spec.placements, coordinate.sizes, coordinate.coordinates, strict=True
    ):
        if isinstance(placement, Shard) and placement.dim == dim:
            blocks = blocks_of(placement, size)
            assert blocks is not None
            before = [0, *accumulate(blocks)].index(index)
            parts = [shard_size(block, num_ranks, rank) for block in blocks]
            index, size = sum(parts[:before]), sum(parts)
    return index


def can_select_locally(call: OpCall, dim: int) -> bool:
    """Whether to offer the strategy in which the indexed dim `dim` of `self` is sharded: each rank
    selects the elements that it holds and writes zeros for the rest, and the result is partial.

    Not if so much is selected that all-reducing the result costs more than gathering `self`.
    """
    source = call.tensor("self")
    if source.num_dims == 0:
        return False  # torch also indexes scalars
    if source.dtype == torch.bool or not isinstance(source.shape[dim], int):
        return False
    num_selected, num_source = product(call.outputs[0].shape), product(source.shape)
    growth = 2 * num_selected - num_source
    return not bool(growth > 0 if isinstance(growth, int) else growth.is_positive)


def zero_except_first_rank(local: LoweringContext, name: str) -> fx.Node:
    """The argument `name`, to which the op adds: where it is replicated and the result is partial,
    zeros on all ranks of the axis but the first, so that the sum over the ranks has it once.
    """
    spec = local.input_spec(name)
    axes = zip(
        spec.placements, local.outputs[0].placements, local.coordinate.coordinates, strict=True
    )
    is_on_earlier_rank = any(
        isinstance(placement, Replicate) and isinstance(result, Partial) and rank > 0
        for placement, result, rank in axes
    )
    argument: fx.Node = local[name]
    return write_zeros(local, argument) if is_on_earlier_rank else argument


def localize_indices(
    local: LoweringContext, index: fx.Node, *, spec: ShardSpec, dim: int
) -> tuple[fx.Node, fx.Node]:
    """Converts indices into the full dim to indices into the rank's shard, and returns them with a
    mask that is true where the element is on another rank.

    Indices of elements on other ranks become 0, so the shard must not be empty.
    """
    start, size = spec.start(dim, local.coordinate), spec.local_shape(local.coordinate)[dim]
    write = local.builder.write
    own_index = write(aten.sub.Scalar, index, start)
    is_remote = write(
        aten.logical_or.default,
        write(aten.lt.Scalar, own_index, 0),
        write(aten.ge.Scalar, own_index, size),
    )
    return write(aten.masked_fill.Scalar, own_index, is_remote, 0), is_remote


def write_zeros(local: LoweringContext, like: fx.Node) -> fx.Node:
    """Zeros of the output's shape that still depend on `like`, so that `like` has a gradient (of
    zero).
    """
    write, dtype = local.builder.write, local.call.outputs[0].dtype
    empty = write(aten.slice.Tensor, write(aten.reshape.default, like, [-1]), 0, 0, 0)
    zero = write(aten.sum.dim_IntList, empty, [0], dtype=dtype)
    return write(aten.expand.default, zero, local.output_shape())
