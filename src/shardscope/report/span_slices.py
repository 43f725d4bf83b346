"""Spans as slices of a Perfetto trace: a track for each thread and clock, nested as they were.

Perfetto takes slices of a track for nested ones: one that begins in another and outlives it, as
tasks that take turns do, gets a track of its own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import final

from shardscope.record import Span

__all__ = ["Event", "Lane", "assign_lanes", "make_span_slices"]

Event = dict[str, object]
# The name of a track, and which of those with that name it is.
Lane = tuple[str, int]


def assign_lanes(spans: Sequence[Span]) -> dict[Lane, list[Span]]:
    """The spans of one rank on their tracks, each before those that lie within it."""
    tracks: dict[str, list[Span]] = defaultdict(list)
    for span in sorted(spans, key=_sort_key):
        tracks[_name_track(span)].append(span)
    lanes: dict[Lane, list[Span]] = {}
    for name in sorted(tracks):
        for number, lane in enumerate(_split(tracks[name])):
            lanes[name, number] = lane
    return lanes


def make_span_slices(spans: Sequence[Span], track: int, shift_ns: int) -> Iterator[Event]:
    """A slice for each span; `shift_ns` brings its clock to that of the trace."""
    for span in spans:
        yield {
            "ph": "X",
            "pid": span.rank,
            "tid": track,
            "ts": (span.start_ns + shift_ns) / 1000,
            "dur": span.duration_ns / 1000,
            "name": span.name,
            "cat": "phase",
            "args": span,
        }


def _sort_key(span: Span) -> tuple[int, int, int]:
    return span.start_ns, -span.duration_ns, span.depth


def _name_track(span: Span) -> str:
    name = f"phases, {span.thread or 'main thread'}"
    return name if span.device == "cpu" else f"{name}, {span.device}"


@final
class _Lane:
    def __init__(self) -> None:
        self.spans: list[Span] = []
        self._open_until: list[int] = []  # when each of those that are open ends, outermost first

    def has_room(self, span: Span) -> bool:
        """Whether the span, which begins after all that are here, lies within what is open."""
        ends = self._open_until
        while ends and ends[-1] <= span.start_ns:
            ends.pop()
        return not ends or span.start_ns + span.duration_ns <= ends[-1]

    def add(self, span: Span) -> None:
        self.spans.append(span)
        self._open_until.append(span.start_ns + span.duration_ns)


def _split(spans: Sequence[Span]) -> list[list[Span]]:
    """The spans on as many lanes as it takes for each to lie within what it begins in."""
    lanes: list[_Lane] = []
    for span in spans:
        lane = next((one for one in lanes if one.has_room(span)), None)
        if lane is None:
            lanes.append(lane := _Lane())
        lane.add(span)
    return [lane.spans for lane in lanes]
