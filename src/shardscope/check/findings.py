"""Findings about ranks that do not issue the same collectives: the condition and the remedy."""

from __future__ import annotations

from msgspec.structs import replace

from shardscope.check.shifts import Shift
from shardscope.check.variations import PlannedVariation
from shardscope.hang import RANK_MISMATCH, RULES, describe_call, match_ranks, name_ranks
from shardscope.launch.decisions import ChangeKind, SiteKind
from shardscope.record import (
    Finding,
    Recording,
    Severity,
)

_K, _S = ChangeKind, SiteKind
_AGREE = (
    "Let all ranks decide the same: all-reduce the flag (dist.all_reduce with MAX) before the "
    "branch, or issue the same collectives in both branches."
)


def explain_divergence(recording: Recording, variation: PlannedVariation | None) -> Finding | None:
    """The finding about ranks that have diverged, under the variation that came before it."""
    findings = [finding for finding in match_ranks(recording) if finding.rule in RULES]
    if not findings:
        return None
    finding = findings[0]
    remedy = _suggest_remedy(finding, recording, variation)
    if variation is None:
        return replace(finding, remedy=remedy, severity=Severity.ERROR)
    return replace(
        finding,
        severity=Severity.WARNING,
        fact=f"if {variation.condition}, {finding.fact}",
        remedy=remedy,
        source=variation.source or finding.source,
    )


def explain_shift(shift: Shift, variation: PlannedVariation) -> Finding:
    """The finding about ranks that skip collectives, or issue more, and go on."""
    ranks, count = name_ranks(shift.ranks), abs(shift.num_calls)
    number = "a collective" if count == 1 else f"{count:,} collectives"
    first = "" if shift.call is None else f", the first {describe_call(shift.call)}"
    verb = (
        ("skips" if len(shift.ranks) == 1 else "skip")
        if shift.num_calls < 0
        else ("issues" if len(shift.ranks) == 1 else "issue")
    )
    more = "that the other ranks issue" if shift.num_calls < 0 else "more than the other ranks"
    return Finding(
        rule=RANK_MISMATCH,
        severity=Severity.WARNING,
        subject=ranks,
        fact=f"if {variation.condition}, {ranks} {verb} {number} {more}{first}; later collectives "
        "are taken for these, and at the end ranks wait forever",
        remedy=_AGREE,
        rank=shift.ranks[0],
        source=variation.source,
    )


def _suggest_remedy(
    finding: Finding, recording: Recording, variation: PlannedVariation | None
) -> str:
    return finding.remedy
