"""Compares what the ranks compiled: ranks with different graphs may deadlock."""

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

COLLECTIVE_ORDER = "compiled-collective-order"
GRAPHS_DIFFER = "compiled-graphs-differ"


def compare_explanations(recordings: Iterable[Recording]) -> Recording:
    """Merge the recordings of several ranks, with findings where their graphs differ."""
    return review_explanations(merge(recordings))


def review_explanations(recording: Recording) -> Recording:
    """The recording with new findings on how the explanations of its ranks differ."""
    ours = (COLLECTIVE_ORDER, GRAPHS_DIFFER)
    other_findings = [finding for finding in recording.findings if finding.rule not in ours]
    return replace(recording, findings=(*_find_differences(recording), *other_findings))


def _find_differences(recording: Recording) -> Iterator[Finding]:
    for first, *rest in _pair_up(recording.explanations):
        for second in rest:
            finding = _compare_collectives(first, second) or _compare_graphs(first, second)
            if finding is not None:
                yield finding


def _pair_up(explanations: Sequence[Explanation]) -> list[list[Explanation]]:
    """Explanations of the same target on all ranks: the first of each rank, the second, …"""
    pairs: dict[tuple[str, int], list[Explanation]] = {}
    num_seen: dict[tuple[int, str], int] = {}
    for explanation in sorted(explanations, key=lambda explanation: explanation.rank):
        number = num_seen[explanation.rank, explanation.target] = (
            num_seen.get((explanation.rank, explanation.target), -1) + 1
        )
        pairs.setdefault((explanation.target, number), []).append(explanation)
    return list(pairs.values())


def _compare_collectives(first: Explanation, second: Explanation) -> Finding | None:
    first_calls, second_calls = _shared(first, second), _shared(second, first)
    for number, (first_call, second_call) in enumerate(
        zip_longest(first_calls, second_calls), start=1
    ):
        if (
            first_call is None
            or second_call is None
            or _call_key(first_call) != _call_key(second_call)
        ):
            return _finding(
                first,
                second,
                rule=COLLECTIVE_ORDER,
                severity=Severity.ERROR,
                fact=f"collective {number} in its graphs is {_name_collective(second_call)} here, "
                f"and {_name_collective(first_call)} on rank {first.rank}: they will deadlock",
                remedy="make all ranks of a group take the same branches; compare their inputs",
                source=_line_of(second_call, first_call),
            )
    return None


def _line_of(*records: GraphCollective | GraphOp | CompiledGraph | None) -> Source | None:
    return next(
        (record.source for record in records if record is not None and record.source is not None),
        None,
    )


def _shared(explanation: Explanation, peer: Explanation) -> list[GraphCollective]:
    """Collectives of `explanation` in groups that contain both ranks."""
    return [
        call
        for call in explanation.collectives
        if not call.group or {explanation.rank, peer.rank} <= set(expand_ranks(call.group))
    ]


def _call_key(collective: GraphCollective) -> tuple[str, str, int]:
    return collective.op, collective.result, count_ranks(collective.group)


def _name_collective(collective: GraphCollective | None) -> str:
    return "none" if collective is None else f"{collective.op} of {collective.result}"


def _compare_graphs(first: Explanation, second: Explanation) -> Finding | None:
    if first.fingerprint == second.fingerprint:
        return None
    for number, (first_graph, second_graph) in enumerate(zip_longest(first.graphs, second.graphs)):
        if (
            first_graph is None
            or second_graph is None
            or first_graph.fingerprint != second_graph.fingerprint
        ):
            position, first_op, second_op = _first_difference(first_graph, second_graph)
            return _finding(
                first,
                second,
                rule=GRAPHS_DIFFER,
                severity=Severity.WARNING,
                fact=f"graph {number}{position}: {_name_op(second_op, second_graph)} here, "
                f"{_name_op(first_op, first_graph)} on rank {first.rank}",
                remedy="ranks that compile at different times wait for each other; if they "
                "should not differ, compare their inputs and code that depends on the "
                "rank",
                source=_line_of(second_op, first_op, second_graph, first_graph),
            )
    return None


def _first_difference(
    first_graph: CompiledGraph | None, second_graph: CompiledGraph | None
) -> tuple[str, GraphOp | None, GraphOp | None]:
    if first_graph is None or second_graph is None:
        return "", None, None
    for number, (first_op, second_op) in enumerate(zip_longest(first_graph.ops, second_graph.ops)):
        if first_op is None or second_op is None or _op_key(first_op) != _op_key(second_op):
            return f", op {number}", first_op, second_op
    return "", None, None


def _op_key(op: GraphOp) -> tuple[str, str, str]:
    return op.op, op.result, op.within


def _name_op(op: GraphOp | None, graph: CompiledGraph | None) -> str:
    if op is not None:
        return f"{op.op} of {op.result}" if op.result else op.op
    return "no such graph" if graph is None else f"{len(graph.ops)} ops"


def _finding(
    first: Explanation,
    second: Explanation,
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
        subject=second.target or first.target or "what was compiled",
        fact=fact,
        remedy=remedy,
        rank=second.rank,
        source=source,
    )
