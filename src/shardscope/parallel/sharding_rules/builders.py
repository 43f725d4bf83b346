"""Helpers that sharding rules and decompositions are written with.

Rules name placements by argument: `make_strategy(call, {"self": Shard(0)}, Shard(0))` shards the
argument `self` and every output along dim 0 and replicates the other arguments.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from shardscope._torch.dispatch import OpOverload, op_schema, overloads_of
from shardscope.parallel.ir.graph import Strategy
from shardscope.parallel.sharding_rules.context import OpCall, TensorSpec, normalize_dim, tensors_in
from shardscope.plan.placements import (
    Partial,
    Placement,
    Reduction,
    Replicate,
    Shard,
    Size,
    shard_size,
)

Dims = int | Sequence[int] | None
"""The dims that a reduction takes; None means all."""

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


def shard_dims(call: OpCall, name: str, dims: Iterable[int]) -> Iterator[Strategy]:
    """A strategy for each dim: the argument `name` and all outputs are sharded along it."""
    for dim in dims:
        yield make_strategy(call, {name: Shard(dim)}, Shard(dim))


def partial_strategy(call: OpCall, *names: str, reduction: Reduction = "sum") -> Strategy:
    """The strategy with the named arguments and all outputs partial, and the rest replicated."""
    partial = Partial(reduction)
    return make_strategy(call, dict.fromkeys(names, partial), partial)


def propagate_partial_sum(call: OpCall, *names: str) -> Iterator[Strategy]:
    """For an op linear in the named arguments: if these are partial sums, so are all outputs."""
    if all(can_be_partial_sum(spec) for spec in call.outputs):
        yield partial_strategy(call, *names)


def propagate_partial(call: OpCall, *names: str, offer_all: bool = False) -> Iterator[Strategy]:
    """For an op that only moves values: if the named arguments are partial, so are all outputs, for
    any reduction.

    Partial maxima and minima are rare, so they are offered only where an input already has that
    placement, or always with `offer_all`.
    """
    yield from propagate_partial_sum(call, *names)
    for reduction in reductions_of(call.outputs[0].dtype):
        if reduction != "sum" and (offer_all or Partial(reduction) in call.input_placements):
            yield partial_strategy(call, *names, reduction=reduction)


def can_be_partial_sum(spec: TensorSpec) -> bool:
    """Whether values of this dtype can be partial sums."""
    return spec.dtype != torch.bool


def reductions_of(dtype: torch.dtype) -> tuple[Reduction, ...]:
    """The reductions that partial values of this dtype may have."""
    if dtype == torch.bool:
        return ("max", "min")
    return ("sum",) if dtype.is_complex else ("sum", "max", "min")


def with_any_placement(call: OpCall, strategy: Strategy, name: str) -> Iterator[Strategy]:
    """For an op that reads only the shape or dtype of the tensor `name`: the strategy with the
    placement that this tensor has, and with the tensor replicated.
    """
    position = call.position_of(name)
    for placement in dict.fromkeys([call.input_placements[position], Replicate()]):
        inputs = (*strategy.inputs[:position], placement, *strategy.inputs[position + 1 :])
        yield replace(strategy, inputs=inputs)


def normalize_dims(dims: Dims, num_dims: int) -> list[int]:
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


def shardable_dims(spec: TensorSpec, *excluded_dims: int) -> list[int]:
    """The tensor's dims whose size can be sharded, without the excluded ones."""
    dims = spec.dims_except(*excluded_dims)
    return [dim for dim in dims if can_be_sharded(spec.shape[dim])]


def has_nonempty_shards(call: OpCall, size: Size) -> bool:
    """Whether every rank gets a nonempty shard of a dim of this size, for ops that fail on empty
    tensors.
    """
    if not isinstance(size, int):
        return True  # symbolic sizes are sharded only if they divide evenly
    return shard_size(size, call.num_ranks, call.num_ranks - 1) > 0


def source_dims(call: OpCall) -> dict[int, int]:
    """For an op of the tensor `self`: maps each dim of its first output to the dim of `self` that
    it is, if it is one.

    Found by running the op on a meta tensor whose dims have distinct sizes, so defaults, negative
    dims and empty lists mean what they mean to torch.
    """
    spec = call.tensor("self")
    probe = torch.empty([dim + 2 for dim in range(spec.num_dims)], dtype=spec.dtype, device="meta")
    result = call.op(**{**call.arguments, "self": probe})
    output = result if isinstance(result, Tensor) else result[0]
    return {new: size - 2 for new, size in enumerate(output.shape) if size > 1}


def broadcast_shape(*shapes: Sequence[Size]) -> tuple[Size, ...]:
    """The shape that tensors of these shapes are broadcast to."""
    num_dims = max(map(len, shapes))
    padded = [(1,) * (num_dims - len(shape)) + tuple(shape) for shape in shapes]
    return tuple(
        next((size for size in sizes if size != 1), 1) for sizes in zip(*padded, strict=True)
    )


def broadcast_shard(spec: TensorSpec | None, output_shape: Sequence[Size], dim: int) -> Placement:
    """The placement of a tensor that is broadcast to `output_shape`, when the dim `dim` of the
    output is sharded: Replicate where the tensor is broadcast along it or is None.
    """
    if spec is None:
        return Replicate()
    own_dim = dim - len(output_shape) + spec.num_dims
    is_broadcast = own_dim < 0 or (spec.shape[own_dim] == 1 and output_shape[dim] != 1)
    return Replicate() if is_broadcast else Shard(own_dim)


def broadcast_shards(
    call: OpCall, output_shape: Sequence[Size]
) -> Iterator[tuple[int, dict[str, Placement]]]:
    """Each dim of the shape that all tensor arguments are broadcast to, with the placements of the
    arguments when it is sharded.
    """
    for dim, size in enumerate(output_shape):
        placements = {
            name: broadcast_shard(spec, output_shape, dim) for name, spec in call.tensors.items()
        }
        if can_be_sharded(size) and any(isinstance(at, Shard) for at in placements.values()):
            yield dim, placements


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


def overloads(*names: str) -> list[OpOverload]:
    """Every functional overload of these aten ops that takes tensors.

    Ops that the installed torch does not have are skipped.
    """
    ops = [
        op
        for name in names
        if hasattr(torch.ops.aten, name)
        for op in overloads_of(f"aten::{name}")
    ]
    return [op for op in ops if not op_schema(op).is_mutable and _takes_tensors(op)]


def _takes_tensors(op: OpOverload) -> bool:
    return any("Tensor" in str(argument.type) for argument in op_schema(op).arguments)


def to_compute_dtype(tensor: Tensor) -> Tensor:
    """Cast to the dtype that torch's kernels compute in: float32 for half precision."""
    is_half = tensor.dtype in (torch.float16, torch.bfloat16)
    return tensor.to(torch.float32) if is_half else tensor


def to_real_dtype(magnitude: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast to the real dtype that magnitudes of `dtype` have."""
    return magnitude.to(dtype.to_real())


def detached_max(tensor: Tensor, dims: int | list[int]) -> Tensor:
    """The maximum along `dims`, detached from autograd, with the dims kept at size 1.

    Subtracting it keeps exp() in range; neither the result nor its gradient depends on it.
    """
    return tensor.detach().amax(dims, keepdim=True)


def safe_sqrt(squares: Tensor) -> Tensor:
    """The square root with a gradient of zero at zero, as torch's norms have, instead
    of infinity.
    """
    is_zero = squares == 0
    return torch.where(is_zero, squares, torch.where(is_zero, 1.0, squares).sqrt())
