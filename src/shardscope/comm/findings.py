"""Findings of a trace: implicit redistributions; with those of `hang`, ranks that disagree.

`find_comm_problems` finds what each rank shows by itself; `review` computes all findings anew.
"""

from __future__ import annotations

from collections import Counter, defaultdict

from msgspec.structs import replace

from shardscope.hang import RULES, find_unknown_waits, is_about_tags, match_ranks, name_ranks
from shardscope.record.base import CollectiveKind
from shardscope.record.layer_names import fold_layers
from shardscope.record.recording import (
    Collective,
    Finding,
    Recording,
    Redistribute,
    Severity,
)
from shardscope.record.traffic import TrafficTotals, choose_busiest, count_traffic
from shardscope.record.units import format_bytes

IMPLICIT_ALL_TO_ALL = "implicit-all-to-all"
IMPLICIT_GATHER = "implicit-gather"

_RULES = {
    CollectiveKind.ALL_GATHER: (IMPLICIT_GATHER, "all-gather"),
    CollectiveKind.ALL_TO_ALL: (IMPLICIT_ALL_TO_ALL, "all-to-all"),
}
_MIN_BYTES = 1024**2


def find_comm_problems(recording: Recording) -> tuple[Finding, ...]:
    """Findings that each rank shows by itself; `match_ranks` compares ranks."""
    implicit: dict[tuple[CollectiveKind, str | None, str], list[Collective]] = defaultdict(list)
    for call in recording.collectives:
        cause = call.cause
        if isinstance(cause, Redistribute) and _is_worth_a_finding(call, cause):
            # Layers of a stack share a problem, so they share a finding.
            owner = call.owner and fold_layers(call.owner)
            implicit[call.kind, owner, cause.asked_by].append(call)
    return tuple(
        _explain_redistribution(pattern, asked_by, calls)
        for (_, pattern, asked_by), calls in implicit.items()
    )


def _is_worth_a_finding(call: Collective, cause: Redistribute) -> bool:
    return cause.is_implicit and call.kind in _RULES and call.output_bytes >= _MIN_BYTES


def _explain_redistribution(pattern: str | None, asked_by: str, calls: list[Collective]) -> Finding:
    first = calls[0]
    rule, name = _RULES[first.kind]
    owners = {call.owner for call in calls}
    ranks = {call.rank for call in calls}
    outside = "outside any module" if first.owner is None else "the root module"
    subject = (pattern if len(owners) > 1 else first.owner) or outside
    on_ranks = f" on {name_ranks(ranks)}" if len(ranks) > 1 else ""
    cause = first.cause
    assert isinstance(cause, Redistribute)
    op = asked_by.removesuffix(".default")
    received = format_bytes(sum(call.output_bytes for call in calls))
    totals: defaultdict[int, TrafficTotals] = defaultdict(TrafficTotals)
    for call in sorted(calls, key=lambda call: call.rank):
        totals[call.rank] += count_traffic(call)
    busiest = choose_busiest(totals.values())
    return Finding(
        rule=rule,
        severity=Severity.WARNING,
        subject=subject,
        fact=f"{op} cannot run on its input as it is sharded, so DTensor inserted an implicit "
        f"{name} ({', '.join(cause.before)} → {', '.join(cause.after)}): "
        f"{_count_calls(calls)}{on_ranks}, {received} received",
        remedy=f"Give {op} inputs whose placements it can use, or redistribute explicitly "
        "where the tensor is smallest.",
        rank=first.rank if len(ranks) == 1 else None,
        source=first.source,
        num_collectives=busiest.count,
        sent_bytes=busiest.wire_bytes,
    )


def _count_calls(calls: list[Collective]) -> str:
    """`4 calls, one in each of blocks.0 … blocks.3`."""
    count = "1 call" if len(calls) == 1 else f"{len(calls):,} calls"
    owners = sorted({call.owner or "the root module" for call in calls}, key=_number_layers)
    if len(owners) == 1:
        return count
    counts = Counter((call.owner, call.rank) for call in calls).values()
    named = " and ".join(owners) if len(owners) == 2 else f"{owners[0]} … {owners[-1]}"
    if set(counts) == {1}:
        return f"{count}, one in each of {named}"
    return f"{count}, in {named} ({len(owners):,} modules)"


def _number_layers(name: str) -> list[tuple[int, str]]:
    """A sort key by which layers.10 comes after layers.9."""
    return [(int(part) if part.isdecimal() else -1, part) for part in name.split(".")]


_FINDING_RULES = (IMPLICIT_ALL_TO_ALL, IMPLICIT_GATHER, *RULES)


def review(recording: Recording) -> Recording:
    """Compute this package's findings anew, and keep all other findings.

    Those of a hang come from more files than the collectives of the recording.
    """
    if recording.hangs:
        return recording
    # A merged recording has more ranks than the ones its findings were computed from.
    gaps = [gap for gap in recording.gaps if not is_about_tags(gap)]
    gaps += find_unknown_waits(recording)
    other_findings = [
        finding for finding in recording.findings if finding.rule not in _FINDING_RULES
    ]
    findings = (*match_ranks(recording), *find_comm_problems(recording), *other_findings)
    return replace(recording, findings=findings, gaps=tuple(gaps))
