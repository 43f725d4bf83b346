"""Named stretches of time, one by one and added up."""

from __future__ import annotations

from operator import attrgetter

from shardscope.record import Recording, Span
from shardscope.report.page.communication import Spans, Timing
from shardscope.report.page.index import Names
from shardscope.report.phases import gather_phases

__all__ = ["make_spans", "make_timings"]

_MAX_SPANS = 20_000


def make_spans(recording: Recording) -> tuple[Spans, str]:
    """Spans by rank and time, the longest if there are too many, and a sentence on the others."""
    spans, words = list(recording.spans), ""
    if len(spans) > _MAX_SPANS:
        words = f"Of {len(spans):,} timed stretches, the {_MAX_SPANS:,} longest are drawn."
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
    """What they add up to, the longest first."""
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
        )
        for line in gather_phases(recording)
    )
