"""Data of the timeline: spans, their sums, and marks where steps or forward passes begin."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from operator import attrgetter

from shardscope.record import PhaseTotal, Recording, Span
from shardscope.report.html.page import RankTiming, Spans, StepMark, Timing
from shardscope.report.html.page_index import Names
from shardscope.report.model.step_numbers import RankSteps
from shardscope.report.text.phase_times import gather_phases

_MAX_SPANS = 20_000
_MAX_RANK_TIMINGS = 5_000  # of all names


def make_spans(recording: Recording) -> tuple[Spans, str]:
    """Make spans by rank and time, the longest if there are too many, and a note on the rest."""
    spans, words = list(recording.spans), ""
    if len(spans) > _MAX_SPANS:
        words = f"Of {len(spans):,} timed spans, the {_MAX_SPANS:,} longest are drawn."
        spans = sorted(spans, key=lambda span: -span.duration_ns)[:_MAX_SPANS]
    spans.sort(key=attrgetter("rank", "start_ns", "depth"))
    return _make_columns(spans), words


def _make_columns(spans: list[Span]) -> Spans:
    names = Names()
    return Spans(
        rank=tuple(span.rank for span in spans),
        name=tuple(names.at(span.name) for span in spans),
        start_ns=tuple(span.start_ns for span in spans),
        duration_ns=tuple(span.duration_ns for span in spans),
        depth=tuple(span.depth for span in spans),
        device=tuple(names.at(span.device) for span in spans),
        names=names.all(),
    )


def make_timings(recording: Recording) -> tuple[Timing, ...]:
    """Sum spans by name and device, longest first."""
    lines = gather_phases(recording)
    has_ranks = sum(len(line.totals) for line in lines) <= _MAX_RANK_TIMINGS
    return tuple(
        Timing(
            name=line.name,
            device=line.device,
            slowest=line.slowest.rank,
            num_ranks=len(line.totals),
            count=line.slowest.count,
            total_ns=line.slowest.total_ns,
            self_ns=line.slowest.self_ns,
            max_ns=line.over_ranks("max_ns").high,
            ranks=tuple(map(_time_rank, line.totals)) if has_ranks else (),
        )
        for line in lines
    )


def _time_rank(total: PhaseTotal) -> RankTiming:
    return RankTiming(
        rank=total.rank,
        count=total.count,
        total_ns=total.total_ns,
        self_ns=total.self_ns,
        max_ns=total.max_ns,
    )


def make_step_marks(steps: Mapping[int, RankSteps], ranks: Collection[int]) -> tuple[StepMark, ...]:
    """Mark the first collective of each step on each of the ranks whose collectives are listed."""
    return tuple(
        StepMark(
            rank=rank,
            name=f"{rank_steps.word} {number}",
            order=start.order,
            start_ns=start.start_ns,
        )
        for rank, rank_steps in steps.items()
        if rank in ranks
        for number, start in enumerate(rank_steps.starts, 1)
    )
