"""Slices, selections, splits, cat and stack."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

import torch
from torch import fx

from shardscope.parallel.ir.graph import Strategy
from shardscope.parallel.ir.shard_spec import ShardSpec
from shardscope.parallel.sharding_rules.builders import (
    blocks_of,
    can_be_partial_sum,
    make_strategy,
    propagate_partial,
    shard_dims,
    shard_in_blocks,
)
from shardscope.parallel.sharding_rules.context import (
    LoweringContext,
    OpCall,
    TensorSpec,
    normalize_dim,
)
from shardscope.parallel.sharding_rules.masking import is_sharded, local_index
from shardscope.parallel.sharding_rules.registry import lowering, rule
from shardscope.plan.placements import Partial, Placement, Replicate, Shard, Size

aten = torch.ops.aten

_END = 2**63 - 1

_SLICES = (aten.slice.Tensor, aten.narrow.default)
_SPLITS = (
    aten.split.Tensor,
    aten.split.sizes,
    aten.split_with_sizes.default,
    aten.chunk.default,
    aten.tensor_split.sections,
    aten.tensor_split.indices,
    aten.unsafe_split.Tensor,
    aten.unsafe_split_with_sizes.default,
    aten.unsafe_chunk.default,
)


@rule(*_SLICES)
def shard_slice(call: OpCall) -> Iterator[Strategy]:
    dim, placement = call.dim(), call.placement_of("self")
    spec = call.tensor("self")
    is_all = not call["start"] and call.outputs[0].shape[dim] == spec.shape[dim]
    yield from shard_dims(call, "self", range(spec.num_dims) if is_all else spec.dims_except(dim))
    yield from propagate_partial(call, "self")
    if is_all or not isinstance(placement, Shard) or placement.dim != dim:
        return
    bounds = _bounds(call)
    if bounds is not None:
        if not _is_from_the_end(call):  # a later axis may shard the end that it counts from
            yield from _shard_blocks(call, placement, [bounds])
        if placement.is_plain and can_be_partial_sum(spec) and _is_partial_cheaper(call, bounds):
            yield make_strategy(
                call, {"self": placement}, Partial(), is_permutation_invariant=False
            )


@rule(*_SPLITS)
def shard_split(call: OpCall) -> Iterator[Strategy]:
    dim, placement = call.dim(), call.placement_of("self")
    yield from shard_dims(call, "self", call.tensor("self").dims_except(dim))
    yield from propagate_partial(call, "self")
    if isinstance(placement, Shard) and placement.dim == dim:
        ends = list(accumulate(output.shape[dim] for output in call.outputs))
        yield from _shard_blocks(call, placement, list(zip([0, *ends], ends, strict=False)))


def _bounds(call: OpCall) -> tuple[int, int] | None:
    """The start and end of the slice; None if they are symbolic or the step is not 1.

    Sizes are those after earlier axes, but bounds refer to the full dim: if they are inconsistent,
    an earlier axis has sharded the dim.
    """
    size: Size = call.tensor("self").shape[call.dim()]
    start: Size = call["start"] or 0
    if "length" in call.arguments:
        end, step = start + call["length"], 1
    else:
        end, step = (_END if call["end"] is None else call["end"]), call["step"]
    if step != 1 or not all(isinstance(value, int) for value in (size, start, end)):
        return None
    start, end = (bound + size if bound < 0 else bound for bound in (start, end))
    end = size if end == _END else end
    is_fitting = 0 <= start <= end <= size and end - start == call.outputs[0].shape[call.dim()]
    return (start, end) if is_fitting else None


def _is_from_the_end(call: OpCall) -> bool:
    return call["start"] is not None and call["start"] < 0


def _is_partial_cheaper(call: OpCall, bounds: tuple[int, int]) -> bool:
    """Whether to slice a sharded dim with a partial result, to which each rank contributes the
    elements that it holds. An all-reduce costs twice a gather, so the slice must be at most half.

    Not if the slice is within the first rank's shard: to rules of later mesh axes, which see sizes
    of shards, it would look like a slice of every shard.
    """
    size, (start, end) = call.tensor("self").shape[call.dim()], bounds
    is_in_first_shard = not _is_from_the_end(call) and end * call.num_ranks <= size
    return bool(2 * (end - start) <= size) and not is_in_first_shard


def _shard_blocks(
    call: OpCall, shard: Shard, bounds: Sequence[tuple[Size, Size]]
) -> Iterator[Strategy]:
    """If the dim is sharded in blocks, and `bounds` (the start and end of each output) are
    boundaries of blocks: every rank slices its own shards of these blocks.
    """
    blocks = blocks_of(shard, call.tensor("self").shape[shard.dim])
    if blocks is None:
        return
    edges = [0, *accumulate(blocks)]
    if all(edge in edges for pair in bounds for edge in pair):
        output_placements: list[Placement] = [
            shard_in_blocks(shard.dim, blocks[edges.index(start) : edges.index(end)])
            for start, end in bounds
        ]
        yield make_strategy(
            call, {"self": shard}, output_placements, is_permutation_invariant=False
        )


@lowering(*_SLICES)
def lower_slice(local: LoweringContext) -> fx.Node:
    dim, spec = local.call.dim(), local.input_spec("self")
    if not is_sharded(spec, dim):
        return local.repeat()
    if spec.shape[dim] == local.outputs[0].shape[dim]:
        return local.builder.write(aten.slice.Tensor, local["self"], dim, 0, _END)
    bounds = _bounds(local.call)
    assert bounds is not None
    if any(
        isinstance(placement, Partial)
        for placement in _placements_along(spec, dim, local.outputs[0])
    ):
        return _lower_local_part(local, bounds)
    start, end = (
        local_index(spec, dim, index=bound, coordinate=local.coordinate) for bound in bounds
    )
    return local.builder.write(aten.slice.Tensor, local["self"], dim, start, end)


def _placements_along(spec: ShardSpec, dim: int, target_spec: ShardSpec) -> list[Placement]:
    """The placements of another tensor along the axes that shard this tensor's dim."""
    return [
        target_placement
        for placement, target_placement in zip(spec.placements, target_spec.placements, strict=True)
        if isinstance(placement, Shard) and placement.dim == dim
    ]


def _lower_local_part(local: LoweringContext, bounds: tuple[int, int]) -> fx.Node:
    """The part of the slice that this rank holds, padded with zeros."""
    dim, spec = local.call.dim(), local.input_spec("self")
    first = spec.start(dim, local.coordinate)
    last = first + spec.local_shape(local.coordinate)[dim]
    start = min(max(bounds[0], first), bounds[1])
    end = max(min(bounds[1], last), start)
    local_slice = local.builder.write(
        aten.slice.Tensor, local["self"], dim, start - first, end - first
    )
    dims_behind = len(spec.shape) - 1 - dim
    padding = [0] * (2 * dims_behind) + [start - bounds[0], bounds[1] - end]
    return local.builder.write(aten.constant_pad_nd.default, local_slice, padding)


@lowering(*_SPLITS)
def lower_split(local: LoweringContext) -> fx.Node:
    dim = local.call.dim()
    if not is_sharded(local.input_spec("self"), dim):
        return local.repeat()
    sizes = [local.output_shape(index)[dim] for index in range(len(local.outputs))]
    return local.builder.write(aten.split_with_sizes.default, local["self"], sizes, dim)


@rule(aten.select.int)
def shard_select(call: OpCall) -> Iterator[Strategy]:
    dim = call.dim()
    yield from _shard_unselected_dims(call, dim)
    spec = call.tensor("self")
    is_known = isinstance(spec.shape[dim], int) and isinstance(call["index"], int)
    if is_known and can_be_partial_sum(spec):
        yield make_strategy(call, {"self": Shard(dim)}, Partial(), is_permutation_invariant=False)


@rule(aten.unbind.int)
def shard_unbind(call: OpCall) -> Iterator[Strategy]:
    yield from _shard_unselected_dims(call, call.dim())


def _shard_unselected_dims(call: OpCall, dim: int) -> Iterator[Strategy]:
    for input_dim in call.tensor("self").dims_except(dim):
        output_dim = input_dim - (input_dim > dim)
        yield make_strategy(call, {"self": Shard(input_dim)}, Shard(output_dim))
    yield from propagate_partial(call, "self")


@lowering(aten.select.int)
def lower_select(local: LoweringContext) -> fx.Node:
    """The rank that holds the index returns the values there, the rest return zeros."""
    dim, spec = local.call.dim(), local.input_spec("self")
    if not is_sharded(spec, dim):
        return local.repeat()
    start, size = spec.start(dim, local.coordinate), spec.local_shape(local.coordinate)[dim]
    own_index = normalize_dim(local["index"], spec.shape[dim]) - start
    if 0 <= own_index < size:
        return local.repeat(index=own_index)
    empty = local.builder.write(aten.slice.Tensor, local["self"], dim, 0, 0)
    return local.builder.write(
        aten.sum.dim_IntList, empty, [dim], dtype=local.call.outputs[0].dtype
    )


@rule(aten.cat.default, aten.concat.default, aten.concatenate.default)
def shard_cat(call: OpCall) -> Iterator[Strategy]:
    yield from _shard_cat(call, normalize_dim(call["dim"], call.outputs[0].num_dims))


@rule(aten.hstack.default)
def shard_hstack(call: OpCall) -> Iterator[Strategy]:
    num_dims = call.outputs[0].num_dims
    if _have_dims(call, num_dims):
        yield from _shard_cat(call, min(1, num_dims - 1))


@rule(aten.vstack.default)
def shard_vstack(call: OpCall) -> Iterator[Strategy]:
    if _have_dims(call, call.outputs[0].num_dims):
        yield from _shard_cat(call, 0)
    elif _have_dims(call, 1):
        yield make_strategy(call, {"tensors": Shard(0)}, Shard(1))
        yield from propagate_partial(call, "tensors")


@rule(aten.stack.default)
def shard_stack(call: OpCall) -> Iterator[Strategy]:
    new = normalize_dim(call["dim"], call.outputs[0].num_dims)
    for dim in range(call.inputs[0].num_dims):
        yield make_strategy(call, {"tensors": Shard(dim)}, Shard(dim + (dim >= new)))
    yield from propagate_partial(call, "tensors")


def _have_dims(call: OpCall, num_dims: int) -> bool:
    return all(spec.num_dims == num_dims for spec in call.inputs)


def _shard_cat(call: OpCall, cat_dim: int) -> Iterator[Strategy]:
    for dim in call.outputs[0].dims_except(cat_dim):
        placements = [_shard_unless_empty(spec, Shard(dim)) for spec in call.inputs]
        yield make_strategy(call, {"tensors": placements}, Shard(dim))
    yield from propagate_partial(call, "tensors")
    yield from _shard_cat_dim(call, cat_dim)


def _shard_unless_empty(spec: TensorSpec, shard: Shard) -> Placement:
    """Replicate for an empty vector, which torch.cat skips whatever dims the other tensors have."""
    return Replicate() if spec.shape == (0,) else shard


def _shard_cat_dim(call: OpCall, dim: int) -> Iterator[Strategy]:
    """Each tensor is a block of the result, or several blocks if it is sharded in blocks."""
    contiguous: list[Placement] = [_shard_unless_empty(spec, Shard(dim)) for spec in call.inputs]
    input_placements = [
        placement if isinstance(placement, Shard) and placement.dim == dim else default
        for placement, default in zip(call.input_placements, contiguous, strict=True)
    ]
    yield from _shard_symbolic_cat_dim(call, dim, contiguous)
    for placements in (
        (contiguous, input_placements) if input_placements != contiguous else (contiguous,)
    ):
        blocks = _block_sizes(call, placements)
        if blocks is not None and all(block % call.num_ranks == 0 for block in blocks):
            yield make_strategy(
                call,
                {"tensors": placements},
                shard_in_blocks(dim, blocks),
                is_permutation_invariant=False,
            )


def _shard_symbolic_cat_dim(
    call: OpCall, dim: int, placements: list[Placement]
) -> Iterator[Strategy]:
    """Blocks of a symbolic size, if all are equal."""
    sizes = {spec.shape[dim] for spec in call.inputs if spec.num_dims > dim}
    if len(sizes) == 1 and not isinstance(sizes.pop(), int):
        output_shard = Shard(dim, outer=len(placements))
        yield make_strategy(
            call, {"tensors": placements}, output_shard, is_permutation_invariant=False
        )


def _block_sizes(call: OpCall, placements: list[Placement]) -> list[int] | None:
    blocks: list[int] = []
    for spec, placement in zip(call.inputs, placements, strict=True):
        if isinstance(placement, Shard):
            tensor_blocks = blocks_of(placement, spec.shape[placement.dim])
            if tensor_blocks is None:
                return None
            blocks += tensor_blocks
    return blocks
