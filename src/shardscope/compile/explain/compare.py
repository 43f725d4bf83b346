"""Whether ranks compiled the same: those that do not may wait for each other forever."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest

from msgspec.structs import replace

from shardscope.record import (
    CompiledGraph,
    Explanation,
    Finding,
    GraphCollective,
    GraphOp,
    Recording,
    Severity,
    Source,
    count_ranks,
    expand_ranks,
    merge,
)

__all__ = ["COLLECTIVE_ORDER", "GRAPHS_DIFFER", "compare_explanations", "review_explanations"]

COLLECTIVE_ORDER = "compiled-collective-order"
GRAPHS_DIFFER = "compiled-graphs-differ"


def compare_explanations(recordings: Iterable[Recording]) -> Recording:
    """The recordings of several ranks as one, with findings where their graphs differ."""
    return review_explanations(merge(recordings))


def review_explanations(recording: Recording) -> Recording:
    """The recording with findings on how its ranks' explanations differ, worked out afresh."""
    ours = (COLLECTIVE_ORDER, GRAPHS_DIFFER)
    others = [one for one in recording.findings if one.rule not in ours]
    return replace(recording, findings=(*_find_differences(recording), *others))


def _find_differences(recording: Recording) -> Iterator[Finding]:
    for first, *rest in _pair_up(recording.explanations):
        for other in rest:
            found = _compare_collectives(first, other) or _compare_graphs(first, other)
            if found is not None:
                yield found


def _pair_up(explanations: Sequence[Explanation]) -> list[list[Explanation]]:
    """What ranks explained of the same name, the first of each with the first, and so on."""
    pairs: dict[tuple[str, int], list[Explanation]] = {}
    seen: dict[tuple[int, str], int] = {}
    for one in sorted(explanations, key=lambda one: one.rank):
        number = seen[one.rank, one.target] = seen.get((one.rank, one.target), -1) + 1
        pairs.setdefault((one.target, number), []).append(one)
    return list(pairs.values())


def _compare_collectives(first: Explanation, other: Explanation) -> Finding | None:
    ours, theirs = _shared(first, other), _shared(other, first)
    for number, (one, two) in enumerate(zip_longest(ours, theirs), start=1):
        if one is None or two is None or _call(one) != _call(two):
            return _finding(
                first,
                other,
                rule=COLLECTIVE_ORDER,
                severity=Severity.ERROR,
                fact=f"collective {number} in its graphs is {_name_collective(two)} here, and "
                f"{_name_collective(one)} on rank {first.rank}: they will deadlock",
                remedy="make all ranks of a group take the same branches; compare their inputs",
                source=_line_of(two, one),
            )
    return None


def _line_of(*some: GraphCollective | GraphOp | CompiledGraph | None) -> Source | None:
    return next((one.source for one in some if one is not None and one.source is not None), None)


def _shared(one: Explanation, other: Explanation) -> list[GraphCollective]:
    """Collectives of groups that both are in."""
    return [
        call
        for call in one.collectives
        if not call.group or {one.rank, other.rank} <= set(expand_ranks(call.group))
    ]


def _call(one: GraphCollective) -> tuple[str, str, int]:
    return one.op, one.result, count_ranks(one.group)


def _name_collective(one: GraphCollective | None) -> str:
    return "none" if one is None else f"{one.op} of {one.result}"


def _compare_graphs(first: Explanation, other: Explanation) -> Finding | None:
    if first.fingerprint == other.fingerprint:
        return None
    for number, (one, two) in enumerate(zip_longest(first.graphs, other.graphs)):
        if one is None or two is None or one.fingerprint != two.fingerprint:
            place, mine, theirs = _first_difference(one, two)
            return _finding(
                first,
                other,
                rule=GRAPHS_DIFFER,
                severity=Severity.WARNING,
                fact=f"graph {number}{place}: {_name_op(theirs, two)} here, "
                f"{_name_op(mine, one)} on rank {first.rank}",
                remedy="ranks that compile at different times wait for each other; if they "
                "should not differ, compare their inputs and code that depends on the "
                "rank",
                source=_line_of(theirs, mine, two, one),
            )
    return None


def _first_difference(
    one: CompiledGraph | None, two: CompiledGraph | None
) -> tuple[str, GraphOp | None, GraphOp | None]:
    if one is None or two is None:
        return "", None, None
    for number, (mine, theirs) in enumerate(zip_longest(one.ops, two.ops)):
        if mine is None or theirs is None or _same_op(mine) != _same_op(theirs):
            return f", op {number}", mine, theirs
    return "", None, None


def _same_op(one: GraphOp) -> tuple[str, str, str]:
    return one.op, one.result, one.within


def _name_op(one: GraphOp | None, graph: CompiledGraph | None) -> str:
    if one is not None:
        return f"{one.op} of {one.result}" if one.result else one.op
    return "no such graph" if graph is None else f"{len(graph.ops)} ops"


def _finding(
    first: Explanation,
    other: Explanation,
    *,
    rule: str,
    severity: Severity,
    fact: str,
    remedy: str,
    source: Source | None,
) -> Finding:
    return Finding(
        rule=rule,
        severity=severity,
        subject=other.target or first.target or "what was compiled",
        fact=fact,
        remedy=remedy,
        rank=other.rank,
        source=source,
    )
