"""A recording as a Chrome/Perfetto JSON trace: a process per rank, a track per mesh axis,
memory as counters.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import final

from msgspec import Struct

from shardscope.record import (
    SIMULATION_TIME,
    Collective,
    MemoryKind,
    MemoryProfile,
    Recording,
    Span,
)
from shardscope.record.encoding import encode_shown_json
from shardscope.report.model.clocks import align_clocks, has_clock

Event = dict[str, object]
# The name of a track, and its number among tracks with the same name.
Lane = tuple[str, int]


def assign_lanes(spans: Sequence[Span]) -> dict[Lane, list[Span]]:
    """Assign one rank's spans to tracks; an enclosing span comes before those inside it."""
    tracks: dict[str, list[Span]] = defaultdict(list)
    for span in sorted(spans, key=_sort_key):
        tracks[_span_track(span)].append(span)
    lanes: dict[Lane, list[Span]] = {}
    for name in sorted(tracks):
        for number, lane in enumerate(_split(tracks[name])):
            lanes[name, number] = lane
    return lanes


def make_span_slices(spans: Sequence[Span], track: int, shift_ns: int) -> Iterator[Event]:
    """Yield a slice for each span; `shift_ns` converts its clock to that of the trace."""
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


def _span_track(span: Span) -> str:
    name = f"phases, {span.thread or 'main thread'}"
    return name if span.device == "cpu" else f"{name}, {span.device}"


@final
class _Lane:
    def __init__(self) -> None:
        self.spans: list[Span] = []
        self._open_until: list[int] = []  # end times of the open spans, outermost first

    def has_room(self, span: Span) -> bool:
        """Whether the span, which starts after all spans here, fits in the innermost open span."""
        ends = self._open_until
        while ends and ends[-1] <= span.start_ns:
            ends.pop()
        return not ends or span.start_ns + span.duration_ns <= ends[-1]

    def add(self, span: Span) -> None:
        self.spans.append(span)
        self._open_until.append(span.start_ns + span.duration_ns)


def _split(spans: Sequence[Span]) -> list[list[Span]]:
    """Distribute spans over lanes, so that each span is nested in the span in which it starts."""
    lanes: list[_Lane] = []
    for span in spans:
        lane = next((lane for lane in lanes if lane.has_room(span)), None)
        if lane is None:
            lanes.append(lane := _Lane())
        lane.add(span)
    return [lane.spans for lane in lanes]


_STEP_US = 1  # between two allocations or releases, which have no recorded time


def make_counters(profile: MemoryProfile) -> Iterator[Event]:
    """Yield the rank's name and its memory by kind at each sample."""
    name = {"name": f"rank {profile.rank}"}
    yield {"ph": "M", "pid": profile.rank, "tid": 0, "name": "process_name", "args": name}
    if not profile.samples:
        return
    first = profile.samples[0].order
    for sample in profile.samples:
        bytes_by_kind = zip(MemoryKind, sample.num_bytes, strict=False)
        yield {
            "ph": "C",
            "pid": profile.rank,
            "tid": 0,
            "ts": (sample.order - first) * _STEP_US,
            "name": "memory (bytes; order of allocations, not time)",
            "cat": "memory",
            "args": {str(kind): num_bytes for kind, num_bytes in bytes_by_kind},
        }


_NOMINAL_NS = 10_000  # durations are not measured; a slice needs one to be visible
_MIN_STEP_NS = 1_000  # between two collectives of one rank, so that none hides another
_TIMED_NOTE = (
    "Starts are when the host issued each collective. Durations were not measured: every slice is "
    "10 µs, or less where the next one on its track begins. Ranks are aligned on the first "
    "collective they share."
)
_ORDER_NOTE = (
    "Collectives have no times, only an order: each slice begins 10 µs after the one that its rank "
    "issued before it."
)
_NOTE = (
    "Phases were measured, by the clock that their track names; in a simulation it is the "
    "simulation's own. Memory has no clock: its counters advance by 1 µs with each allocation or "
    "release."
)
_NO_DURATIONS = "start times, durations not measured"
_ORDER = "order, not time"
_SIMULATED_ORDER = "simulated order, not time"


def render_perfetto(recording: Recording) -> bytes:
    """Render a trace for ui.perfetto.dev; the same recording gives the same bytes."""
    return b"".join(render_perfetto_chunks(recording))


def render_perfetto_chunks(recording: Recording) -> Iterator[bytes]:
    """Yield what `render_perfetto` returns, one rank at a time: that needs far less memory."""
    is_timed = has_clock(recording)
    note = f"{_TIMED_NOTE if is_timed else _ORDER_NOTE} {_NOTE}"
    metadata = {"producer": "shardscope", "note": note, "run": recording.run}
    head = {"displayTimeUnit": "ns", "otherData": metadata, "traceEvents": []}
    yield encode_shown_json(head).removesuffix(b"]}")
    before = b""
    is_simulated = recording.run.is_simulated
    caveat = _NO_DURATIONS if is_timed else _SIMULATED_ORDER if is_simulated else _ORDER
    for timeline in _arrange_by_time(recording) if is_timed else _arrange_by_order(recording):
        tracks = _number_tracks(timeline.calls)
        events = [
            *_name_tracks(timeline.rank, tracks, caveat),
            *_make_slices(timeline.calls, timeline.starts, tracks),
            *_make_phases(timeline, len(tracks), SIMULATION_TIME if is_simulated else ""),
        ]
        yield before + encode_shown_json(events).removeprefix(b"[").removesuffix(b"]")
        before = b","
    for profile in sorted(recording.memory, key=lambda profile: profile.rank):
        events = list(make_counters(profile))
        yield before + encode_shown_json(events).removeprefix(b"[").removesuffix(b"]")
        before = b","
    yield b"]}\n"


class _Rank(Struct, frozen=True):
    """One rank's collectives and spans, with start times on the common clock."""

    rank: int
    calls: list[Collective]
    starts: list[int]
    spans: list[Span]
    shift_ns: int  # to add to the rank's own clock


def _group_by_rank(
    recording: Recording,
) -> tuple[dict[int, list[Collective]], dict[int, list[Span]]]:
    calls: dict[int, list[Collective]] = defaultdict(list)
    spans: dict[int, list[Span]] = defaultdict(list)
    for call in sorted(recording.collectives, key=lambda call: (call.rank, call.order)):
        calls[call.rank].append(call)
    for span in recording.spans:
        spans[span.rank].append(span)
    return calls, spans


def _arrange_by_order(recording: Recording) -> Iterator[_Rank]:
    """Place each rank's collectives in order of issue, and its phases from time zero."""
    calls, spans = _group_by_rank(recording)
    for rank in sorted({*calls, *spans}):
        rank_calls = calls.get(rank, [])
        starts = [number * _NOMINAL_NS for number in range(len(rank_calls))]
        timed = spans.get(rank, [])
        yield _Rank(
            rank, rank_calls, starts, timed, -min((span.start_ns for span in timed), default=0)
        )


def _arrange_by_time(recording: Recording) -> Iterator[_Rank]:
    """Place each rank's records on a common clock that starts at zero."""
    calls, spans = _group_by_rank(recording)
    offsets = dict.fromkeys(spans, 0) | align_clocks(calls)
    firsts = {rank: _first_ns(calls.get(rank), spans.get(rank)) for rank in offsets}
    earliest = min((offsets[rank] + first for rank, first in firsts.items()), default=0)
    for rank in sorted(offsets):
        rank_calls, shift_ns = calls.get(rank, []), offsets[rank] - earliest
        yield _Rank(
            rank, rank_calls, _space_out(rank_calls, shift_ns), spans.get(rank, []), shift_ns
        )


def _first_ns(calls: list[Collective] | None, spans: list[Span] | None) -> int:
    starts = [calls[0].start_ns or 0] if calls else []
    return min(starts + [span.start_ns for span in spans or ()])


def _space_out(calls: list[Collective], shift_ns: int) -> list[int]:
    starts: list[int] = []
    soonest = 0
    for call in calls:
        starts.append(max(soonest, (call.start_ns or 0) + shift_ns))
        soonest = starts[-1] + _MIN_STEP_NS
    return starts


def _make_phases(timeline: _Rank, num_tracks: int, caveat: str) -> Iterator[Event]:
    """Yield names and slices of the tracks of phases, after the tracks of collectives."""
    for track, (lane, spans) in enumerate(
        assign_lanes(timeline.spans).items(), start=num_tracks + 1
    ):
        yield from _name_track(timeline.rank, _add_caveat(lane[0], caveat), track)
        yield from make_span_slices(spans, track, timeline.shift_ns)


def _track(call: Collective) -> str:
    return call.axis if call.axis is not None else call.group


def _number_tracks(calls: list[Collective]) -> dict[str, int]:
    # From 1: Perfetto treats thread 0 as the idle thread.
    return {name: number for number, name in enumerate(sorted({*map(_track, calls)}), start=1)}


def _name_tracks(rank: int, tracks: dict[str, int], caveat: str) -> Iterator[Event]:
    yield _metadata(rank, "process_name", {"name": f"rank {rank}"})
    yield _metadata(rank, "process_sort_index", {"sort_index": rank})
    for name, number in tracks.items():
        yield from _name_track(rank, _add_caveat(name, caveat), number)


def _add_caveat(name: str, caveat: str) -> str:
    return f"{name} ({caveat})" if caveat else name


def _name_track(rank: int, name: str, number: int) -> Iterator[Event]:
    yield _metadata(rank, "thread_name", {"name": name}, number)
    yield _metadata(rank, "thread_sort_index", {"sort_index": number}, number)


def _metadata(rank: int, name: str, args: Event, track: int = 0) -> Event:
    return {"ph": "M", "pid": rank, "tid": track, "name": name, "args": args}


def _make_slices(
    calls: list[Collective], starts: list[int], tracks: dict[str, int]
) -> Iterator[Event]:
    ends: dict[str, int] = {}
    slices: list[Event] = []
    # In reverse: a slice ends where the next slice on its track begins.
    for call, start in zip(reversed(calls), reversed(starts), strict=True):
        track = _track(call)
        end = min(ends.get(track, start + _NOMINAL_NS), start + _NOMINAL_NS)
        ends[track] = start
        slices.append(_make_slice(call, tracks[track], start, end - start))
    return reversed(slices)


def _make_slice(call: Collective, track: int, start_ns: int, duration_ns: int) -> Event:
    return {
        "ph": "X",
        "pid": call.rank,
        "tid": track,
        "ts": start_ns / 1000,
        "dur": duration_ns / 1000,
        "name": f"{call.kind} {call.owner}" if call.owner else str(call.kind),
        "cat": str(call.phase),
        "args": call,
    }
