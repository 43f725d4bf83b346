"""Findings of `shardscope hang`: the most likely cause, further ones, and slow ranks."""

from __future__ import annotations

from collections.abc import Iterator

from shardscope.hang.rank_calls import RANK_MISMATCH, name_ranks
from shardscope.hang.wait_text import DEADLOCK, RANK_BEHIND
from shardscope.record.hang_records import (
    CauseKind,
    Certainty,
    HangAnalysis,
    HangCause,
    SlowRank,
)
from shardscope.record.ranks import expand_ranks
from shardscope.record.recording import Finding, Severity
from shardscope.record.units import format_duration

CALL_SKIPPED = "call-skipped"
COLLECTIVE_STUCK = "collective-stuck"
COMPILE_DIFFERS = "compile-differs"
RANK_FAILED = "rank-failed"
RANK_LOST = "rank-lost"
SLOW_RANK = "slow-rank"

_MAX_FINDINGS = 4
RULES_OF_CAUSES = {
    CauseKind.MISMATCH: RANK_MISMATCH,
    CauseKind.DIFFERENT_CALL: RANK_MISMATCH,
    CauseKind.UNMATCHED_TRANSFER: RANK_MISMATCH,
    CauseKind.SKIPPED_CALL: CALL_SKIPPED,
    CauseKind.WRONG_ORDER: DEADLOCK,
    CauseKind.OUT_OF_MEMORY: RANK_FAILED,
    CauseKind.CRASH: RANK_FAILED,
    CauseKind.STOPPED: RANK_LOST,
    CauseKind.LOST: RANK_LOST,
    CauseKind.DATA_LOADING: RANK_BEHIND,
    CauseKind.FILE_SYSTEM: RANK_BEHIND,
    CauseKind.COMPILING: RANK_BEHIND,
    CauseKind.SLOW: RANK_BEHIND,
    CauseKind.DIFFERENT_COMPILE: COMPILE_DIFFERS,
    CauseKind.NETWORK: COLLECTIVE_STUCK,
    CauseKind.UNKNOWN: COLLECTIVE_STUCK,
}
"""The rule of the finding for each class of cause."""


def make_findings(analysis: HangAnalysis) -> tuple[Finding, ...]:
    """The findings of an analysis, the most likely cause first."""
    causes = analysis.causes[:_MAX_FINDINGS]
    return (
        *(_explain_cause(cause, is_first=cause is causes[0]) for cause in causes),
        *map(_explain_slow, analysis.slow_ranks),
    )


def _explain_cause(cause: HangCause, *, is_first: bool) -> Finding:
    ranks = expand_ranks(cause.ranks)
    is_sure = is_first and cause.certainty is not Certainty.POSSIBLE
    evidence = list(_list_evidence(cause))
    return Finding(
        rule=RULES_OF_CAUSES[cause.kind],
        severity=Severity.ERROR if is_sure else Severity.WARNING,
        subject=f"group {cause.group}" if cause.group is not None else name_ranks(ranks),
        fact="; ".join([cause.fact, *evidence]),
        remedy=cause.remedy,
        rank=ranks[0] if ranks else None,
        source=cause.source,
    )


def _list_evidence(cause: HangCause) -> Iterator[str]:
    """Evidence that the sentence of the cause does not have yet."""
    for item in cause.evidence[:3]:
        if item not in cause.fact:
            yield item


def _explain_slow(slow: SlowRank) -> Finding:
    return Finding(
        rule=SLOW_RANK,
        severity=Severity.WARNING,
        subject=f"rank {slow.rank}",
        fact=f"the other ranks waited for rank {slow.rank} at {slow.num_last:,} of its "
        f"{slow.num_collectives:,} collectives, {format_duration(slow.excess_ns)} in all: it took "
        f"{format_duration(slow.mean_late_ns)} longer than they did since the collective before, "
        f"on average, most of it before those of group {slow.group}",
        remedy="Compare that rank's device, host and data with the others': clocks and "
        "temperature (nvidia-smi), other processes, its data loader. phases() shows where its own "
        "time goes.",
        rank=slow.rank,
        source=slow.source,
    )
