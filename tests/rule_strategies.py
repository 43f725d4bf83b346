"""All strategies of an op's rule, asked with every sharding of its inputs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from shardscope.parallel.ir.graph import Strategy
from shardscope.parallel.sharding_rules.context import OpCall, TensorSpec
from shardscope.parallel.sharding_rules.registry import find_rule
from shardscope.plan.placements import Placement, Replicate, Shard, divides, shard_size

__all__ = ["can_run", "find_strategies"]


def find_strategies(
    call: OpCall, *, candidate_placements: Sequence[Sequence[Placement]] = ()
) -> list[Strategy]:
    """All strategies of the op's rule for any placements of its inputs; none without a rule.

    `candidate_placements` are tried in addition to every sharding of a single input.
    """
    rule = find_rule(call.op)
    if rule is None:
        return []
    candidates = [call.input_placements, *_single_shards(call), *map(tuple, candidate_placements)]
    strategies = [
        strategy
        for input_placements in candidates
        for strategy in rule(replace(call, input_placements=input_placements))
    ]
    lifted = [blocks for strategy in strategies for blocks in _in_blocks(call, strategy)]
    return [
        strategy for strategy in dict.fromkeys([*strategies, *lifted]) if can_run(call, strategy)
    ]


def can_run(call: OpCall, strategy: Strategy) -> bool:
    """Whether the shards match on every rank: uneven shards do only along dims of equal size."""
    shards = _shards_of(call, strategy)
    is_same_size = len({size for _, size in shards}) <= 1
    return is_same_size or all(_is_even(shard, size, call.num_ranks) for shard, size in shards)


def _shards_of(call: OpCall, strategy: Strategy) -> list[tuple[Shard, int]]:
    placements = (*strategy.inputs, *strategy.outputs)
    specs = (*call.inputs, *call.outputs)
    return [
        (placement, spec.shape[placement.dim])
        for placement, spec in zip(placements, specs, strict=True)
        if isinstance(placement, Shard)
    ]


def _is_even(shard: Shard, size: int, num_ranks: int) -> bool:
    if shard.segments:
        return all(divides(num_ranks, segment) for segment in shard.segments)
    return divides(shard.outer * num_ranks, size)


def _single_shards(call: OpCall) -> Iterator[tuple[Placement, ...]]:
    """Placements with one input sharded and the others replicated."""
    replicated: tuple[Placement, ...] = (Replicate(),) * len(call.inputs)
    for position, spec in enumerate(call.inputs):
        for shard in _all_shards(spec, call.num_ranks):
            yield (*replicated[:position], shard, *replicated[position + 1 :])


def _all_shards(spec: TensorSpec, num_ranks: int) -> Iterator[Shard]:
    for dim, size in enumerate(spec.shape):
        yield Shard(dim)
        for block in _blocks(size, num_ranks):
            yield block.at(dim)


def _in_blocks(call: OpCall, strategy: Strategy) -> Iterator[Strategy]:
    """The same strategy with shards in blocks, to which the propagation pass applies it too."""
    shards = _shards_of(call, strategy)
    sizes = {size for _, size in shards}
    if (
        not strategy.is_permutation_invariant
        or len(sizes) != 1
        or not all(shard.is_plain for shard, _ in shards)
    ):
        return
    for block in _blocks(sizes.pop(), call.num_ranks):
        yield replace(
            strategy,
            inputs=tuple(_with_blocks(placement, block) for placement in strategy.inputs),
            outputs=tuple(_with_blocks(placement, block) for placement in strategy.outputs),
        )


def _with_blocks(placement: Placement, block: Shard) -> Placement:
    return block.at(placement.dim) if isinstance(placement, Shard) else placement


def _blocks(size: int, num_ranks: int) -> Iterator[Shard]:
    """Ways to shard a dim in blocks that give every rank a nonempty shard."""
    for outer in range(2, size):
        if size % outer == 0 and shard_size(size // outer, num_ranks, num_ranks - 1):
            yield Shard(0, outer=outer)
    for unit in range(num_ranks, size // 3 + 1, num_ranks):
        if size % unit == 0:
            yield Shard(0, segments=(size - 2 * unit, unit, unit))
