"""Reads figures of a hang: causes, waits, sides of divergences, progress of groups, slow ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from shardscope.record import Recording, format_ranks
from shardscope.record.base import name_line
from shardscope.record.hang_records import GroupProgress, HangAnalysis, HangCause, HangWait
from shardscope.report.result.figures import (
    HangCauseFigures,
    HangFigures,
    HangProgressFigures,
    HangSideFigures,
    HangWaitFigures,
    SkewFigures,
    SlowRankFigures,
)
from shardscope.report.text.hang import describe_hang_call, summarize_hang


def read_hangs(recording: Recording) -> tuple[HangFigures, ...]:
    """Read each analysis of a hang."""
    return tuple(map(_read_hang, recording.hangs))


def _read_hang(hang: HangAnalysis) -> HangFigures:
    formats: Counter[str] = Counter()
    for source in hang.sources:
        formats[source.format] += source.num_files
    return HangFigures(
        verdict=summarize_hang(hang),
        is_hang=hang.is_hang,
        formats=dict(formats),
        ranks=format_ranks(hang.ranks),
        missing_ranks=format_ranks(hang.missing_ranks),
        causes=tuple(map(_read_cause, hang.causes)),
        waits=tuple(map(_read_wait, hang.waits)),
        cycle=hang.cycle,
        sides=tuple(_read_sides(hang)),
        progress=tuple(map(_read_progress, hang.progress)),
        slow_ranks=tuple(
            SlowRankFigures(
                rank=slow.rank,
                num_last=slow.num_last,
                num_collectives=slow.num_collectives,
                excess_ns=slow.excess_ns,
                group=slow.group,
            )
            for slow in hang.slow_ranks
        ),
        skews=tuple(
            SkewFigures(
                group=skew.group,
                num_collectives=skew.num_collectives,
                skew_ns=skew.skew_ns,
                transfer_ns=skew.transfer_ns,
                last_rank=skew.last_rank,
            )
            for skew in hang.skews
        ),
        unknowns=hang.unknowns,
    )


def _read_cause(cause: HangCause) -> HangCauseFigures:
    return HangCauseFigures(
        kind=str(cause.kind),
        certainty=str(cause.certainty),
        ranks=format_ranks(cause.ranks),
        fact=cause.fact,
        remedy=cause.remedy,
        evidence=cause.evidence,
        group=cause.group or "",
        position=cause.position,
        line=name_line(cause.source),
    )


def _read_wait(wait: HangWait) -> HangWaitFigures:
    return HangWaitFigures(
        waiters=format_ranks(wait.waiters),
        missing=format_ranks(wait.missing),
        call=describe_hang_call(wait.call),
        group=wait.group,
        position=wait.position,
        line=name_line(wait.call.source),
    )


def _read_sides(hang: HangAnalysis) -> Iterator[HangSideFigures]:
    for divergence in hang.divergences:
        for side in divergence.sides:
            yield HangSideFigures(
                group=divergence.group,
                position=divergence.position,
                differing=divergence.differing,
                ranks=format_ranks(side.ranks),
                call=describe_hang_call(side.call),
                line="" if side.call is None else name_line(side.call.source),
            )


def _read_progress(row: GroupProgress) -> HangProgressFigures:
    return HangProgressFigures(
        group=row.group,
        ranks=format_ranks(row.ranks),
        num_issued=row.num_issued,
        num_done=row.num_done,
        behind=row.behind,
        last=describe_hang_call(row.last),
        line="" if row.last is None else name_line(row.last.source),
        stack=row.now,
    )
