"""Words that rules share: strategies by the arguments' names, dims, blocks of a dim."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from shardscope.parallel.placements import Partial, Placement, Replicate, Shard, Size
from shardscope.parallel.rules.call import Call, Strategy, TensorSpec, tensors_in
from shardscope.parallel.rules.dims import reductions_of

__all__ = [
    "Placed",
    "blocks_of",
    "broadcast_cut",
    "can_add",
    "keep_terms",
    "lay",
    "leaves_some",
    "offered_to",
    "pass_terms",
    "shard_of",
]

Placed = Placement | Sequence[Placement]
"""The placement of a tensor, or of each tensor in a list."""


def lay(
    call: Call, placements: Mapping[str, Placed], outputs: Placed, *, is_order_blind: bool = True
) -> Strategy:
    """The strategy in which the arguments named lie so, and the others are whole.

    One placement for a list of tensors, or for several outputs, is that of each.
    """
    inputs: list[Placement] = []
    for name, value in call.arguments.items():
        placed = placements.get(name, Replicate())
        inputs += _spread(placed, len(list(tensors_in([value]))))
    return Strategy(tuple(inputs), tuple(_spread(outputs, len(call.outputs))), is_order_blind)


def _spread(placed: Placed, count: int) -> list[Placement]:
    return list(placed) if isinstance(placed, Sequence) else [placed] * count


def leaves_some(call: Call, size: Size) -> bool:
    """Whether every rank gets some of a dim of this size, for ops that fail on nothing."""
    if not isinstance(size, int):
        return True  # open sizes are cut only where they divide
    return -(-size // call.num_ranks) * (call.num_ranks - 1) < size


def broadcast_cut(spec: TensorSpec | None, like: TensorSpec, dim: int) -> Placement:
    """How an argument lies when `like`, what it is broadcast to, is cut along `dim`."""
    if spec is None:
        return Replicate()
    own = dim - like.num_dims + spec.num_dims
    is_broadcast = own < 0 or (spec.shape[own] == 1 and like.shape[dim] != 1)
    return Replicate() if is_broadcast else Shard(own)


def can_add(spec: TensorSpec) -> bool:
    """Whether values of this type can lie in addends."""
    return spec.dtype != torch.bool


def pass_terms(call: Call, *names: str) -> Iterator[Strategy]:
    """Addends of the arguments named become addends of all results, for an op linear in them."""
    if all(can_add(one) for one in call.outputs):
        yield lay(call, dict.fromkeys(names, Partial()), Partial())


def keep_terms(call: Call, *names: str) -> Iterator[Strategy]:
    """For an op that only moves values: terms stay terms, also those of a maximum.

    A largest value is not differentiated, and asked for only where there is one.
    """
    yield from pass_terms(call, *names)
    for reduction in reductions_of(call.outputs[0].dtype):
        term = Partial(reduction)
        if reduction != "sum" and term in call.offered:
            yield lay(call, dict.fromkeys(names, term), term)


def offered_to(call: Call, name: str) -> tuple[Placement, ...]:
    """How the tensors of one argument lie now."""
    position = 0
    for other, value in call.arguments.items():
        count = len(list(tensors_in([value])))
        if other == name:
            return tuple(call.offered[position : position + count])
        position += count
    raise KeyError(name)


def blocks_of(cut: Shard, size: Size) -> tuple[int, ...] | None:
    """The sizes of the blocks that a cut dim consists of; None where they are open."""
    if cut.segments:
        return cut.segments
    if isinstance(size, int) and isinstance(cut.outer, int):
        return (size // cut.outer,) * cut.outer
    return None


def shard_of(dim: int, blocks: Sequence[int]) -> Shard:
    """The cut of a dim that consists of these blocks."""
    if len(set(blocks)) <= 1:
        return Shard(dim, outer=max(1, len(blocks)))
    return Shard(dim, segments=tuple(blocks))
