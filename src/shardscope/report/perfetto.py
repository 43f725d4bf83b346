"""A recording as a Chrome/Perfetto JSON trace: a process per rank, a track per mesh axis."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from shardscope.record import Collective, Recording
from shardscope.record.encoding import encode_json
from shardscope.report.align import align_clocks

__all__ = ["render_perfetto", "render_perfetto_pieces"]

_NOMINAL_NS = 10_000  # durations are not measured; a slice needs one to be seen
_MIN_STEP_NS = 1_000  # between two collectives of one rank, so that none hides another
_NOTE = (
    "Starts are when the host issued each collective. Durations were not measured: every slice is "
    "10 µs, or less where the next one on its track begins. Ranks are aligned on the first "
    "collective they share."
)

Event = dict[str, object]


def render_perfetto(recording: Recording) -> bytes:
    """Open the result in ui.perfetto.dev; the same recording gives the same bytes."""
    return b"".join(render_perfetto_pieces(recording))


def render_perfetto_pieces(recording: Recording) -> Iterator[bytes]:
    """The same, one rank at a time: all events together would need many times the memory."""
    other = {"producer": "shardscope", "note": _NOTE, "run": recording.run}
    head = {"displayTimeUnit": "ns", "otherData": other, "traceEvents": []}
    yield encode_json(head).removesuffix(b"]}")
    before = b""
    for rank, mine, starts in _place_in_time(recording):
        tracks = _number_tracks(mine)
        events = [*_name_tracks(rank, tracks), *_make_slices(mine, starts, tracks)]
        yield before + encode_json(events).removeprefix(b"[").removesuffix(b"]")
        before = b","
    yield b"]}\n"


def _place_in_time(recording: Recording) -> Iterator[tuple[int, list[Collective], list[int]]]:
    """Each rank's collectives, and their starts on one common clock that begins at zero."""
    calls: dict[int, list[Collective]] = defaultdict(list)
    for call in sorted(recording.collectives, key=lambda call: (call.rank, call.order)):
        calls[call.rank].append(call)
    offsets = align_clocks(calls)
    earliest = min((offsets[rank] + mine[0].start_ns for rank, mine in calls.items()), default=0)
    for rank, mine in calls.items():
        starts: list[int] = []
        soonest = 0
        for call in mine:
            starts.append(max(soonest, call.start_ns + offsets[rank] - earliest))
            soonest = starts[-1] + _MIN_STEP_NS
        yield rank, mine, starts


def _track(call: Collective) -> str:
    return call.axis if call.axis is not None else call.group


def _number_tracks(calls: list[Collective]) -> dict[str, int]:
    # From 1: Perfetto takes thread 0 for the idle thread.
    return {name: number for number, name in enumerate(sorted({*map(_track, calls)}), start=1)}


def _name_tracks(rank: int, tracks: dict[str, int]) -> Iterator[Event]:
    yield _metadata(rank, "process_name", {"name": f"rank {rank}"})
    yield _metadata(rank, "process_sort_index", {"sort_index": rank})
    for name, number in tracks.items():
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
