"""A recording as a Chrome/Perfetto JSON trace: a process per rank, a track per mesh axis.

Phases, where they were timed, have a track for each thread and clock. Memory, where it was
recorded, has a counter for each kind. Tracks whose times are not those of a run say so in their
names.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from msgspec import Struct

from shardscope.record import SIMULATION_TIME, Collective, Recording, Span
from shardscope.record.encoding import encode_shown_json
from shardscope.report.align import align_clocks, has_clock
from shardscope.report.memory_counters import make_counters
from shardscope.report.span_slices import Event, assign_lanes, make_span_slices

__all__ = ["render_perfetto", "render_perfetto_pieces"]

_NOMINAL_NS = 10_000  # durations are not measured; a slice needs one to be seen
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
    """Open the result in ui.perfetto.dev; the same recording gives the same bytes."""
    return b"".join(render_perfetto_pieces(recording))


def render_perfetto_pieces(recording: Recording) -> Iterator[bytes]:
    """The same, one rank at a time: all events together would need many times the memory."""
    is_timed = has_clock(recording)
    note = f"{_TIMED_NOTE if is_timed else _ORDER_NOTE} {_NOTE}"
    other = {"producer": "shardscope", "note": note, "run": recording.run}
    head = {"displayTimeUnit": "ns", "otherData": other, "traceEvents": []}
    yield encode_shown_json(head).removesuffix(b"]}")
    before = b""
    is_simulated = recording.run.is_simulated
    caveat = _NO_DURATIONS if is_timed else _SIMULATED_ORDER if is_simulated else _ORDER
    for one in _place_in_time(recording) if is_timed else _place_in_order(recording):
        tracks = _number_tracks(one.calls)
        events = [
            *_name_tracks(one.rank, tracks, caveat),
            *_make_slices(one.calls, one.starts, tracks),
            *_make_phases(one, len(tracks), SIMULATION_TIME if is_simulated else ""),
        ]
        yield before + encode_shown_json(events).removeprefix(b"[").removesuffix(b"]")
        before = b","
    for profile in sorted(recording.memory, key=lambda one: one.rank):
        events = list(make_counters(profile))
        yield before + encode_shown_json(events).removeprefix(b"[").removesuffix(b"]")
        before = b","
    yield b"]}\n"


class _Rank(Struct, frozen=True):
    """What one rank did, and when by a clock that all share."""

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


def _place_in_order(recording: Recording) -> Iterator[_Rank]:
    """Each rank's collectives one after the other, and its phases from zero on."""
    calls, spans = _group_by_rank(recording)
    for rank in sorted({*calls, *spans}):
        mine = calls.get(rank, [])
        starts = [number * _NOMINAL_NS for number in range(len(mine))]
        timed = spans.get(rank, [])
        yield _Rank(rank, mine, starts, timed, -min((one.start_ns for one in timed), default=0))


def _place_in_time(recording: Recording) -> Iterator[_Rank]:
    """Each rank's records on one common clock, which begins at zero."""
    calls, spans = _group_by_rank(recording)
    offsets = dict.fromkeys(spans, 0) | align_clocks(calls)
    firsts = {rank: _first_ns(calls.get(rank), spans.get(rank)) for rank in offsets}
    earliest = min((offsets[rank] + first for rank, first in firsts.items()), default=0)
    for rank in sorted(offsets):
        mine, shift_ns = calls.get(rank, []), offsets[rank] - earliest
        yield _Rank(rank, mine, _space_out(mine, shift_ns), spans.get(rank, []), shift_ns)


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


def _make_phases(one: _Rank, num_tracks: int, caveat: str) -> Iterator[Event]:
    """Names and slices of the tracks of phases, which come after the others."""
    for track, (lane, spans) in enumerate(assign_lanes(one.spans).items(), start=num_tracks + 1):
        yield from _name_track(one.rank, _add_caveat(lane[0], caveat), track)
        yield from make_span_slices(spans, track, one.shift_ns)


def _track(call: Collective) -> str:
    return call.axis if call.axis is not None else call.group


def _number_tracks(calls: list[Collective]) -> dict[str, int]:
    # From 1: Perfetto takes thread 0 for the idle thread.
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
    # Backwards: a slice ends where the next one on its track begins.
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
