"""Data of the timeline: spans, their sums, and marks where steps or forward passes begin."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import groupby
from operator import attrgetter

from shardscope.record import Collective, Phase, Recording, Span
from shardscope.report.html.page import Spans, StepMark, Timing
from shardscope.report.html.page_index import Names
from shardscope.report.text.phase_times import gather_phases

_STEP = "step"  # name of the spans that `phases` and trainers' callbacks time for each step

_MAX_SPANS = 20_000


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


def make_step_marks(
    recording: Recording, calls: Sequence[Collective], *, is_timed: bool
) -> tuple[StepMark, ...]:
    """Mark the first collective of each step on each rank; `calls` are by rank and order.

    A step begins with a span of that name, or with the first forward collective after one of the
    optimizer. Optimizers often issue none: what is known then is where a forward pass follows
    a backward pass, and the marks say so. There are no marks for a single step.
    """
    marks: list[StepMark] = []
    starts_by_rank = _list_span_starts(recording) if is_timed else {}
    for rank, group in groupby(calls, key=attrgetter("rank")):
        rank_calls = list(group)
        starts = starts_by_rank.get(rank, [])
        if len(starts) > 1:
            marks += _mark_spans(rank, starts, rank_calls)
        else:
            marks += _mark_phases(rank, rank_calls)
    return tuple(marks)


def _list_span_starts(recording: Recording) -> dict[int, list[int]]:
    starts: defaultdict[int, list[int]] = defaultdict(list)
    for span in recording.spans:
        if span.name == _STEP and not span.is_inner:
            starts[span.rank].append(span.start_ns)
    return {rank: sorted(rank_starts) for rank, rank_starts in starts.items()}


def _mark_spans(rank: int, starts: list[int], calls: list[Collective]) -> Iterator[StepMark]:
    for number, start in enumerate(starts, 1):
        later = (call.order for call in calls if (call.start_ns or 0) >= start)
        order = next(later, calls[-1].order + 1)
        yield StepMark(rank=rank, name=f"{_STEP} {number}", order=order, start_ns=start)


def _mark_phases(rank: int, calls: list[Collective]) -> list[StepMark]:
    has_optimizer = any(call.phase is Phase.OPTIMIZER for call in calls)
    word = _STEP if has_optimizer else "forward"
    ending = Phase.OPTIMIZER if has_optimizer else Phase.BACKWARD
    firsts, is_ended = [], True
    for call in calls:
        if call.phase is Phase.FORWARD and is_ended:
            firsts.append(call)
            is_ended = False
        is_ended = is_ended or call.phase is ending
    if len(firsts) < 2:
        return []
    return [
        StepMark(rank=rank, name=f"{word} {number}", order=call.order, start_ns=call.start_ns or 0)
        for number, call in enumerate(firsts, 1)
    ]
