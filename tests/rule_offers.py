"""What a rule may be asked: every cut of its inputs, and what it then answers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from shardscope.parallel.placements import Placement, Replicate, Shard, cut_size, divides
from shardscope.parallel.rules.call import Call, Strategy, TensorSpec
from shardscope.parallel.rules.lookup import find_rule

__all__ = ["can_run", "find_strategies"]


def find_strategies(call: Call, *, offers: Sequence[Sequence[Placement]] = ()) -> list[Strategy]:
    """All that the op's rule answers, whatever its inputs may lie like; none without a rule.

    `offers` adds to the cuts that are tried for each input.
    """
    rule = find_rule(call.op)
    if rule is None:
        return []
    tried = [call.offered, *_single_cuts(call), *map(tuple, offers)]
    found = [one for offered in tried for one in rule(replace(call, offered=offered))]
    lifted = [blocks for one in found for blocks in _in_blocks(call, one)]
    return [one for one in dict.fromkeys([*found, *lifted]) if can_run(call, one)]


def can_run(call: Call, strategy: Strategy) -> bool:
    """Whether the cuts match on every rank: uneven ones do only along dims of one size."""
    cuts = _cuts_of(call, strategy)
    is_one_size = len({size for _, size in cuts}) <= 1
    return is_one_size or all(_is_even(cut, size, call.num_ranks) for cut, size in cuts)


def _cuts_of(call: Call, strategy: Strategy) -> list[tuple[Shard, int]]:
    placements = (*strategy.inputs, *strategy.outputs)
    specs = (*call.inputs, *call.outputs)
    return [
        (one, spec.shape[one.dim])
        for one, spec in zip(placements, specs, strict=True)
        if isinstance(one, Shard)
    ]


def _is_even(cut: Shard, size: int, num_ranks: int) -> bool:
    if cut.segments:
        return all(divides(num_ranks, one) for one in cut.segments)
    return divides(cut.outer * num_ranks, size)


def _single_cuts(call: Call) -> Iterator[tuple[Placement, ...]]:
    """One input cut somewhere, the others whole."""
    whole: tuple[Placement, ...] = (Replicate(),) * len(call.inputs)
    for position, spec in enumerate(call.inputs):
        for cut in _all_cuts(spec, call.num_ranks):
            yield (*whole[:position], cut, *whole[position + 1 :])


def _all_cuts(spec: TensorSpec, num_ranks: int) -> Iterator[Shard]:
    for dim, size in enumerate(spec.shape):
        yield Shard(dim)
        for block in _blocks(size, num_ranks):
            yield block.at(dim)


def _in_blocks(call: Call, strategy: Strategy) -> Iterator[Strategy]:
    """The same strategy on cuts in blocks, as the engine takes it to be good for."""
    cuts = _cuts_of(call, strategy)
    sizes = {size for _, size in cuts}
    if not strategy.is_order_blind or len(sizes) != 1 or not all(one.is_plain for one, _ in cuts):
        return
    for block in _blocks(sizes.pop(), call.num_ranks):
        yield replace(
            strategy,
            inputs=tuple(_lift(one, block) for one in strategy.inputs),
            outputs=tuple(_lift(one, block) for one in strategy.outputs),
        )


def _lift(placement: Placement, block: Shard) -> Placement:
    return block.at(placement.dim) if isinstance(placement, Shard) else placement


def _blocks(size: int, num_ranks: int) -> Iterator[Shard]:
    """Ways to cut a dim in blocks that leave something to every rank."""
    for outer in range(2, size):
        if size % outer == 0 and cut_size(size // outer, num_ranks, num_ranks - 1):
            yield Shard(0, outer=outer)
    for unit in range(num_ranks, size // 3 + 1, num_ranks):
        if size % unit == 0:
            yield Shard(0, segments=(size - 2 * unit, unit, unit))
