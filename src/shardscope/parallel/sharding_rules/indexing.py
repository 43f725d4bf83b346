"""Indexing by tensors, gather and index_select."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import final

import torch
from torch import fx

from shardscope.parallel.ir.graph import Strategy
from shardscope.parallel.sharding_rules.builders import (
    PlacementOrList,
    broadcast_shape,
    broadcast_shard,
    can_be_partial_sum,
    make_strategy,
    propagate_partial,
)
from shardscope.parallel.sharding_rules.context import (
    LoweringContext,
    OpCall,
    TensorSpec,
    normalize_dim,
)
from shardscope.parallel.sharding_rules.masking import (
    can_select_locally,
    is_sharded,
    localize_indices,
    write_zeros,
    zero_except_first_rank,
)
from shardscope.parallel.sharding_rules.registry import lowering, rule
from shardscope.plan.placements import Partial, Placement, Replicate, Shard, Size

aten = torch.ops.aten


@final
@dataclass(frozen=True)
class _Indexing:
    """Which dims of the source are indexed, and where the dims of the indices are in the result."""

    source: TensorSpec
    indices: Sequence[TensorSpec | None]

    @cached_property
    def has_masks(self) -> bool:
        return any(index is not None and _is_mask(index) for index in self.indices)

    @cached_property
    def indexed_dims(self) -> list[int]:
        """The dims of the source that are indexed: one per index tensor, and as many as it has for
        a mask.
        """
        dims: list[int] = []
        position = 0
        for index in self.indices:
            num_dims = index.num_dims if index is not None and _is_mask(index) else 1
            if index is not None:
                dims += range(position, position + num_dims)
            position += num_dims
        return dims

    @cached_property
    def num_index_dims(self) -> int:
        """The number of dims that the indices have when broadcast together."""
        return max(
            1 if _is_mask(index) else index.num_dims for index in self.indices if index is not None
        )

    @cached_property
    def first_index_dim(self) -> int:
        """The result's dim where the index dims begin: in place of the indexed dims, or 0 if these
        are apart.
        """
        dims = self.indexed_dims
        return dims[0] if dims == list(range(dims[0], dims[-1] + 1)) else 0

    def untouched_dims(self) -> Iterator[tuple[int, int]]:
        """Dims that no index touches, as pairs (source dim, result dim)."""
        dims = [dim for dim in range(self.source.num_dims) if dim not in self.indexed_dims]
        for position, dim in enumerate(dims):
            yield (
                dim,
                position if position < self.first_index_dim else position + self.num_index_dims,
            )

    def index_placements(self, dim: int) -> list[Placement]:
        """The placement of each index when the dim `dim` of the broadcast indices is sharded."""
        indices = [index for index in self.indices if index is not None]
        own_dims = [dim - self.num_index_dims + index.num_dims for index in indices]
        return [
            Shard(own_dim) if own_dim >= 0 and index.shape[own_dim] != 1 else Replicate()
            for index, own_dim in zip(indices, own_dims, strict=True)
        ]


def _indexing_of(call: OpCall) -> _Indexing:
    return _Indexing(call.tensor("self"), call["indices"])


def _is_mask(spec: TensorSpec) -> bool:
    return spec.dtype in (torch.bool, torch.uint8)


@rule(aten.index.Tensor)
def shard_index(call: OpCall) -> Iterator[Strategy]:
    indexing = _indexing_of(call)
    for dim, output_dim in indexing.untouched_dims():
        yield make_strategy(call, {"self": Shard(dim)}, Shard(output_dim))
    if can_be_partial_sum(call.tensor("self")):
        yield make_strategy(call, {"self": Partial()}, Partial())
    if indexing.has_masks:
        return  # the number of elements a mask selects is known only at run time
    yield from _shard_indices(call, indexing)
    for dim in indexing.indexed_dims:
        if can_select_locally(call, dim):
            yield make_strategy(
                call, {"self": Shard(dim)}, Partial(), is_permutation_invariant=False
            )


def _shard_indices(call: OpCall, indexing: _Indexing) -> Iterator[Strategy]:
    for dim in range(indexing.num_index_dims):
        placements = indexing.index_placements(dim)
        if any(isinstance(placement, Shard) for placement in placements):
            yield make_strategy(
                call, {"indices": placements}, Shard(indexing.first_index_dim + dim)
            )


@lowering(aten.index.Tensor)
def lower_index(local: LoweringContext) -> fx.Node:
    """Where an indexed dim is sharded, look up the rank's own indices and write zeros
    for the rest.
    """
    spec, indexing = local.input_spec("self"), _indexing_of(local.call)
    shard_dims = [dim for dim in indexing.indexed_dims if is_sharded(spec, dim)]
    if not shard_dims:
        return local.repeat()
    if any(spec.local_shape(local.coordinate)[dim] == 0 for dim in shard_dims):
        return write_zeros(local, local["self"])
    indices, masks = list(local["indices"]), []
    for dim in shard_dims:
        index = _count_from_front(local, indices[dim], spec.shape[dim])
        indices[dim], is_remote = localize_indices(local, index, spec=spec, dim=dim)
        masks.append(is_remote)
    return _zero_remote_selections(local, local.repeat(indices=indices), masks, indexing)


def _count_from_front(local: LoweringContext, index: fx.Node, size: int) -> fx.Node:
    """The index with negative elements replaced by those that count from the front."""
    return local.builder.write(aten.remainder.Scalar, index, size)


def _zero_remote_selections(
    local: LoweringContext, result: fx.Node, masks: list[fx.Node], indexing: _Indexing
) -> fx.Node:
    dims_behind = len(local.outputs[0].shape) - indexing.first_index_dim - indexing.num_index_dims
    for mask in masks:
        for _ in range(dims_behind):
            mask = local.builder.write(aten.unsqueeze.default, mask, -1)
        result = local.builder.write(aten.masked_fill.Scalar, result, mask, 0)
    return result


@rule(aten.index_put.default)
def shard_index_put(call: OpCall) -> Iterator[Strategy]:
    indexing = _indexing_of(call)
    if indexing.has_masks and call.tensor("values").num_dims > 0:
        return  # the number of values a mask takes is known only at run time
    indexed_shape = _indexed_shape(indexing)
    for dim, indexed_dim in indexing.untouched_dims():
        values = broadcast_shard(call["values"], indexed_shape, indexed_dim)
        yield make_strategy(call, {"self": Shard(dim), "values": values}, Shard(dim))
    if can_be_partial_sum(call.tensor("self")):
        yield make_strategy(call, {"self": Partial(), "values": Partial()}, Partial())
    if indexing.has_masks:
        yield from _shard_masks(call)
    elif call["accumulate"] and can_be_partial_sum(call.tensor("self")):
        yield from _shard_put_indices(call, indexing, indexed_shape)


def _indexed_shape(indexing: _Indexing) -> tuple[Size, ...]:
    """The shape of reading with the same indices, which the values are broadcast to.

    Masks select a number of elements that is not known; they count as 1.
    """
    indices = [index for index in indexing.indices if index is not None and not _is_mask(index)]
    index_shape = broadcast_shape(
        (1,) * indexing.num_index_dims, *(index.shape for index in indices)
    )
    untouched_sizes = [
        size for dim, size in enumerate(indexing.source.shape) if dim not in indexing.indexed_dims
    ]
    return (
        *untouched_sizes[: indexing.first_index_dim],
        *index_shape,
        *untouched_sizes[indexing.first_index_dim :],
    )


def _shard_masks(call: OpCall) -> Iterator[Strategy]:
    """A scalar written where a mask is true, with the mask sharded like the tensor."""
    if len(call["indices"]) == 1:
        for dim in range(call["indices"][0].num_dims):
            placements = {"self": Shard(dim), "indices": Shard(dim)}
            yield make_strategy(call, placements, Shard(dim))


def _shard_put_indices(
    call: OpCall, indexing: _Indexing, indexed_shape: tuple[Size, ...]
) -> Iterator[Strategy]:
    """Shard the indices of an accumulating write: ranks may add different values, which gives
    partial sums.
    """
    for dim in range(indexing.num_index_dims):
        index_placements = indexing.index_placements(dim)
        values = broadcast_shard(call["values"], indexed_shape, indexing.first_index_dim + dim)
        if any(isinstance(placement, Shard) for placement in index_placements):
            for target in (Replicate(), Partial()):
                placements: dict[str, PlacementOrList] = {
                    "self": target,
                    "indices": index_placements,
                    "values": values,
                }
                yield make_strategy(call, placements, Partial())


@lowering(aten.index_put.default)
def lower_index_put(local: LoweringContext) -> fx.Node:
    return local.repeat(self=zero_except_first_rank(local, "self"))


@rule(aten.gather.default)
def shard_gather(call: OpCall) -> Iterator[Strategy]:
    source, index, indexed_dim = call.tensor("self"), call.tensor("index"), call.dim()
    if index.num_dims != source.num_dims:
        return  # a scalar and a vector, or an empty index
    for dim in range(source.num_dims):
        if dim == indexed_dim:
            yield make_strategy(call, {"index": Shard(dim)}, Shard(dim))
        elif source.shape[dim] == index.shape[dim]:
            yield make_strategy(call, {"self": Shard(dim), "index": Shard(dim)}, Shard(dim))
    yield from _shard_indexed_dim(call, indexed_dim)
    yield from propagate_partial(call, "self")


@rule(aten.index_select.default)
def shard_index_select(call: OpCall) -> Iterator[Strategy]:
    source, indexed_dim = call.tensor("self"), call.dim()
    if source.num_dims == 0 or call.tensor("index").num_dims == 0:
        return
    for dim in range(source.num_dims):
        placements = {"index": Shard(0)} if dim == indexed_dim else {"self": Shard(dim)}
        yield make_strategy(call, placements, Shard(dim))
    yield from _shard_indexed_dim(call, indexed_dim)
    yield from propagate_partial(call, "self")


@rule(aten.take_along_dim.default)
def shard_take_along_dim(call: OpCall) -> Iterator[Strategy]:
    """As gather, but the dims that are not indexed broadcast. None without a dim, which indexes the
    flattened tensor.
    """
    if call["dim"] is None:
        return
    output = call.outputs[0]
    indexed_dim = normalize_dim(call["dim"], output.num_dims)
    for dim in range(output.num_dims):
        if dim == indexed_dim:
            yield make_strategy(call, {"indices": Shard(dim)}, Shard(dim))
        elif output.shape[dim] != 1:
            placements = {
                name: broadcast_shard(spec, output.shape, dim)
                for name, spec in call.tensors.items()
            }
            yield make_strategy(call, placements, Shard(dim))
    yield from _shard_indexed_dim(call, indexed_dim)
    yield from propagate_partial(call, "self")


def _shard_indexed_dim(call: OpCall, dim: int) -> Iterator[Strategy]:
    if can_select_locally(call, dim):
        yield make_strategy(call, {"self": Shard(dim)}, Partial(), is_permutation_invariant=False)


@lowering(aten.gather.default, aten.take_along_dim.default)
def lower_gather(local: LoweringContext) -> fx.Node:
    spec, name = local.input_spec("self"), _index_name(local)
    if local["dim"] is None:
        return local.repeat()
    dim = normalize_dim(local["dim"], len(spec.shape))
    if not is_sharded(spec, dim):
        return local.repeat()
    if spec.local_shape(local.coordinate)[dim] == 0:
        return write_zeros(local, local["self"])
    own_index, is_remote = localize_indices(local, local[name], spec=spec, dim=dim)
    return _zero_remote(local, local.repeat(**{name: own_index}), is_remote)


@lowering(aten.index_select.default)
def lower_index_select(local: LoweringContext) -> fx.Node:
    spec = local.input_spec("self")
    dim = normalize_dim(local["dim"], len(spec.shape))
    if not is_sharded(spec, dim):
        return local.repeat()
    if spec.local_shape(local.coordinate)[dim] == 0:
        return write_zeros(local, local["self"])
    own_index, is_remote = localize_indices(local, local["index"], spec=spec, dim=dim)
    shape = [-1] + [1] * (len(spec.shape) - 1 - dim)
    mask = local.builder.write(aten.reshape.default, is_remote, shape)
    return _zero_remote(local, local.repeat(index=own_index), mask)


def _index_name(local: LoweringContext) -> str:
    return "index" if "index" in local.arguments else "indices"


def _zero_remote(local: LoweringContext, result: fx.Node, is_remote: fx.Node) -> fx.Node:
    return local.builder.write(aten.masked_fill.Scalar, result, is_remote, 0)
