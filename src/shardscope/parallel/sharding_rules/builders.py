"""Helpers that sharding rules are written with: dims, and strategies by which dims are sharded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from shardscope._torch.dispatch import op_schema
from shardscope.parallel.sharding_rules.context import OpCall, Strategy, TensorSpec, tensors_in
from shardscope.plan.placements import Partial, Placement, Reduction, Replicate, Shard, Size


def normalize_dim(dim: int, num_dims: int) -> int:
    """A dim counted from the front; `dim` may be negative."""
    return dim % max(num_dims, 1)


def normalize_dims(dims: int | Iterable[int] | None, num_dims: int) -> list[int]:
    """Dims counted from the front, in order; None or an empty list means all."""
    if isinstance(dims, int):
        dims = [dims]
    normalized = sorted({normalize_dim(dim, num_dims) for dim in dims or ()})
    return normalized or list(range(num_dims))


def can_be_sharded(size: Size) -> bool:
    """Whether a dim of this size can be sharded. Dims of size 1 are not, because they may be
    broadcast.
    """
    return not (isinstance(size, int) and size <= 1)


def fill_replicated(placements: Mapping[int, Placement], count: int) -> tuple[Placement, ...]:
    """A tuple of `count` placements: those given by position, Replicate for the rest."""
    return tuple(placements.get(position, Replicate()) for position in range(count))


def shard_at(call: OpCall, inputs: Mapping[int, int], outputs: Mapping[int, int]) -> Strategy:
    """The strategy that shards tensors along one dim each (position to dim) and replicates the
    rest.
    """
    return Strategy(
        fill_replicated({at: Shard(dim) for at, dim in inputs.items()}, len(call.inputs)),
        fill_replicated({at: Shard(dim) for at, dim in outputs.items()}, len(call.outputs)),
    )


def partial_strategy(call: OpCall, *positions: int, reduction: Reduction = "sum") -> Strategy:
    """The strategy with partial inputs at `positions`, the rest replicated, and every output
    partial.
    """
    partial = Partial(reduction)
    return Strategy(
        fill_replicated(dict.fromkeys(positions, partial), len(call.inputs)),
        (partial,) * len(call.outputs),
    )


def propagate_partial(call: OpCall) -> Iterator[Strategy]:
    """For an op that only moves values: if its first input is partial, so is its output, for any
    reduction.
    """
    for reduction in reductions_of(call.outputs[0].dtype):
        yield partial_strategy(call, 0, reduction=reduction)


def reductions_of(dtype: torch.dtype) -> tuple[Reduction, ...]:
    """The reductions that partial values of this dtype may have."""
    if dtype == torch.bool:
        return ("max", "min")
    return ("sum",) if dtype.is_complex else ("sum", "max", "min")


def with_any_second_placement(call: OpCall, strategy: Strategy) -> Iterator[Strategy]:
    """For an op that reads only the shape or dtype of its second tensor: allow any
    placement of it.
    """
    for placement in dict.fromkeys([call.input_placements[1], Replicate()]):
        yield replace(strategy, inputs=(strategy.inputs[0], placement))


def source_dims(call: OpCall) -> dict[int, int]:
    """Maps each dim of the first output to the dim of the first input that it is, if it is one.

    Found by running the op on a meta tensor whose dims have distinct sizes, so defaults, negative
    dims and empty lists mean what they mean to torch.
    """
    spec = call.inputs[0]
    probe = torch.empty([dim + 2 for dim in range(spec.num_dims)], dtype=spec.dtype, device="meta")
    arguments = {
        name: probe if isinstance(value, TensorSpec) else value
        for name, value in call.arguments.items()
    }
    result = call.op(**arguments)
    output = result if isinstance(result, torch.Tensor) else result[0]
    return {new: size - 2 for new, size in enumerate(output.shape) if size > 1}


def matched_dims(
    shape: Sequence[Size], broadcast_shape: Sequence[Size]
) -> Iterator[tuple[int, int]]:
    """Pairs (dim, broadcast dim) for the dims of a tensor that are not broadcast to
    `broadcast_shape`.

    A size other than 1 equals the broadcast size, although symbolic sizes may express that in
    different symbols: those of two inputs that export did not relate.
    """
    offset = len(broadcast_shape) - len(shape)
    for dim, size in enumerate(shape):
        are_known = isinstance(size, int) and isinstance(broadcast_shape[dim + offset], int)
        if can_be_sharded(size) and (size == broadcast_shape[dim + offset] or not are_known):
            yield dim, dim + offset


def overloads(*names: str) -> list[Any]:
    """Every functional overload of these aten ops that takes tensors.

    Ops that the installed torch does not have are skipped.
    """
    packets = [getattr(torch.ops.aten, name, None) for name in names]
    kinds = [
        getattr(packet, kind)
        for packet in packets
        if packet is not None
        for kind in packet.overloads()
    ]
    return [op for op in kinds if not op_schema(op).is_mutable and _takes_tensors(op)]


def _takes_tensors(op: Any) -> bool:
    return any("Tensor" in str(slot.type) for slot in op_schema(op).arguments)


PlacementOrList = Placement | Sequence[Placement]
"""The placement of a tensor, or of each tensor in a list."""


def make_strategy(
    call: OpCall,
    placements: Mapping[str, PlacementOrList],
    outputs: PlacementOrList,
    *,
    is_permutation_invariant: bool = True,
) -> Strategy:
    """The strategy in which the named arguments have these placements and the rest are replicated.

    A single placement for a list of tensors, or for several outputs, applies to each of them.
    """
    inputs: list[Placement] = []
    for name, value in call.arguments.items():
        placement = placements.get(name, Replicate())
        inputs += _expand_placement(placement, len(list(tensors_in([value]))))
    return Strategy(
        tuple(inputs),
        tuple(_expand_placement(outputs, len(call.outputs))),
        is_permutation_invariant,
    )


def _expand_placement(placement: PlacementOrList, count: int) -> list[Placement]:
    return list(placement) if isinstance(placement, Sequence) else [placement] * count


def leaves_some(call: OpCall, size: Size) -> bool:
    """Whether every rank gets a nonempty shard of a dim of this size, for ops that fail on empty
    tensors.
    """
    if not isinstance(size, int):
        return True  # symbolic sizes are sharded only if they divide evenly
    return -(-size // call.num_ranks) * (call.num_ranks - 1) < size


def broadcast_shard(spec: TensorSpec | None, like: TensorSpec, dim: int) -> Placement:
    """The placement of an argument that is broadcast to `like`, when `like` is sharded
    along `dim`.
    """
    if spec is None:
        return Replicate()
    own_dim = dim - like.num_dims + spec.num_dims
    is_broadcast = own_dim < 0 or (spec.shape[own_dim] == 1 and like.shape[dim] != 1)
    return Replicate() if is_broadcast else Shard(own_dim)


def can_be_partial_sum(spec: TensorSpec) -> bool:
    """Whether values of this dtype can be partial sums."""
    return spec.dtype != torch.bool


def propagate_partial_sum(call: OpCall, *names: str) -> Iterator[Strategy]:
    """For an op linear in the named arguments: if these are partial sums, so are all outputs."""
    if all(can_be_partial_sum(spec) for spec in call.outputs):
        yield make_strategy(call, dict.fromkeys(names, Partial()), Partial())


def propagate_partial_named(call: OpCall, *names: str) -> Iterator[Strategy]:
    """For an op that only moves values: partial named arguments give partial outputs, for any
    reduction.

    Maxima and minima are not differentiated, so they are offered only where an input has that
    placement.
    """
    yield from propagate_partial_sum(call, *names)
    for reduction in reductions_of(call.outputs[0].dtype):
        partial = Partial(reduction)
        if reduction != "sum" and partial in call.input_placements:
            yield make_strategy(call, dict.fromkeys(names, partial), partial)


def placements_of_argument(call: OpCall, name: str) -> tuple[Placement, ...]:
    """The current placements of the tensors of one argument."""
    position = 0
    for argument_name, value in call.arguments.items():
        count = len(list(tensors_in([value])))
        if argument_name == name:
            return tuple(call.input_placements[position : position + count])
        position += count
    raise KeyError(name)


def blocks_of(shard: Shard, size: Size) -> tuple[int, ...] | None:
    """The sizes of the blocks that a sharded dim consists of; None if they are symbolic."""
    if shard.segments:
        return shard.segments
    if isinstance(size, int) and isinstance(shard.outer, int):
        return (size // shard.outer,) * shard.outer
    return None


def shard_in_blocks(dim: int, blocks: Sequence[int]) -> Shard:
    """The Shard placement of a dim that consists of these blocks."""
    if len(set(blocks)) <= 1:
        return Shard(dim, outer=max(1, len(blocks)))
    return Shard(dim, segments=tuple(blocks))
