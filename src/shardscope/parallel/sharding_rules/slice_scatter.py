"""Writes to a part of a tensor: slice_scatter, select_scatter and diagonal_scatter."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx

from shardscope.parallel.ir.graph import Strategy
from shardscope.parallel.sharding_rules.builders import (
    can_be_sharded,
    make_strategy,
    partial_strategy,
    shardable_dims,
)
from shardscope.parallel.sharding_rules.context import LoweringContext, OpCall, normalize_dim
from shardscope.parallel.sharding_rules.masking import is_sharded
from shardscope.parallel.sharding_rules.registry import lowering, rule
from shardscope.plan.placements import Shard, Size

aten = torch.ops.aten

_END = 2**63 - 1


def shard_written_dim(call: OpCall, written_dim: int) -> Iterator[Strategy]:
    """Shard the dim that is written to; the written values are replicated."""
    names = [name for name in ("start", "end", "index") if call.arguments.get(name) is not None]
    sizes: list[Size] = [call.tensor("self").shape[written_dim], *(call[name] for name in names)]
    is_known = all(isinstance(size, int) for size in sizes)
    if is_known and ("index" in names or _is_proper_slice(call, written_dim)):
        yield make_strategy(
            call, {"self": Shard(written_dim)}, Shard(written_dim), is_permutation_invariant=False
        )


def _is_proper_slice(call: OpCall, written_dim: int) -> bool:
    """Whether the slice is certainly a part of the dim, and not all of it.

    Bounds refer to the full dim, but sizes are those of the shards of earlier mesh axes. A slice as
    large as the dim's size, or as a shard of it, could be all of the dim for some axis.
    """
    size = call.tensor("self").shape[written_dim]
    shard = -(-size // call.num_ranks)
    return call["step"] == 1 and call.tensor("src").shape[written_dim] not in (size, shard)


@lowering(aten.select_scatter.default)
def lower_select_scatter(local: LoweringContext) -> fx.Node:
    """Write a slice of size 1; on other ranks one of size 0, so that the written values have a
    gradient there.
    """
    spec = local.input_spec("self")
    dim = normalize_dim(local["dim"], len(spec.shape))
    if not is_sharded(spec, dim):
        return local.repeat()
    index = normalize_dim(local["index"], spec.shape[dim]) - spec.start(dim, local.coordinate)
    is_here = 0 <= index < spec.local_shape(local.coordinate)[dim]
    start, end = (index, index + 1) if is_here else (0, 0)
    write = local.builder.write
    source = write(aten.unsqueeze.default, local["src"], dim)
    part = write(aten.slice.Tensor, source, dim, 0, end - start)
    return write(aten.slice_scatter.default, local["self"], part, dim, start, end)


@lowering(aten.slice_scatter.default)
def lower_slice_scatter(local: LoweringContext) -> fx.Node:
    spec = local.input_spec("self")
    dim = normalize_dim(local["dim"], len(spec.shape))
    if not is_sharded(spec, dim):
        return local.repeat()
    if is_sharded(local.input_spec("src"), dim):  # all of the dim is written
        return local.repeat(start=0, end=_END)
    start, end = _bounds(local, spec.shape[dim])
    first = spec.start(dim, local.coordinate)
    last = first + spec.local_shape(local.coordinate)[dim]
    own_start = min(max(start, first), last)
    own_end = max(min(end, last), own_start)
    source = local.builder.write(
        aten.slice.Tensor, local["src"], dim, own_start - start, own_end - start
    )
    return local.repeat(src=source, start=own_start - first, end=own_end - first)


def _bounds(local: LoweringContext, size: int) -> tuple[int, int]:
    start = local["start"] or 0
    end = _END if local["end"] is None else local["end"]
    start, end = (max(0, min(size, bound + size if bound < 0 else bound)) for bound in (start, end))
    return start, max(start, end)


@rule(aten.slice_scatter.default)
def shard_slice_scatter(call: OpCall) -> Iterator[Strategy]:
    """Every dim; along the sliced dim, each rank writes the part that falls into its shard."""
    sliced_dim = call.dim()
    is_full = _is_full_slice(call, sliced_dim)
    for dim in shardable_dims(call.tensor("self")):
        if dim != sliced_dim or is_full:
            yield make_strategy(call, {"self": Shard(dim), "src": Shard(dim)}, Shard(dim))
    if not is_full:
        yield from shard_written_dim(call, sliced_dim)
    yield from _propagate_partial_writes(call)


@rule(aten.select_scatter.default)
def shard_select_scatter(call: OpCall) -> Iterator[Strategy]:
    """Every dim; along the selected dim, the rank that holds the index writes."""
    yield from _shard_all_dims_but(call, call.dim())
    yield from shard_written_dim(call, call.dim())
    yield from _propagate_partial_writes(call)


@rule(aten.diagonal_scatter.default)
def shard_diagonal_scatter(call: OpCall) -> Iterator[Strategy]:
    """Every dim but the two of the diagonal."""
    yield from _shard_all_dims_but(call, call.dim("dim1"), call.dim("dim2"))
    yield from _propagate_partial_writes(call)


def _shard_all_dims_but(call: OpCall, *excluded_dims: int) -> Iterator[Strategy]:
    """The written values `src` have the dims of `self` without the excluded ones, in order."""
    spec = call.tensor("self")
    for source_dim, dim in enumerate(spec.dims_except(*excluded_dims)):
        if can_be_sharded(spec.shape[dim]):
            yield make_strategy(call, {"self": Shard(dim), "src": Shard(source_dim)}, Shard(dim))


def _propagate_partial_writes(call: OpCall) -> Iterator[Strategy]:
    """If both tensors are partial, so is the result, unless the written values are rounded."""
    before, after = call.tensor("src").dtype, call.tensor("self").dtype
    if torch.bool not in (before, after) and torch.promote_types(before, after) == after:
        yield partial_strategy(call, "self", "src")


def _is_full_slice(call: OpCall, dim: int) -> bool:
    size, end = call.tensor("self").shape[dim], call["end"]
    reaches_end = end is None or end == size or (isinstance(end, int) and end >= 2**62)
    return call["start"] in (None, 0) and call["step"] == 1 and reaches_end
