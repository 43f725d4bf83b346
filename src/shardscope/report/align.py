"""Clocks of ranks brought together: each rank counts time from its own beginning."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence

from shardscope.record import Collective, CollectiveKind, Recording

__all__ = ["align_clocks", "has_clock"]

# What two ranks can have in common: a group, or a group and the route of a transfer.
Meeting = tuple[str, int, int]


def has_clock(recording: Recording) -> bool:
    """Whether collectives have times of the run's own clock; a simulation's are not."""
    times = (call.start_ns for call in recording.collectives)
    return not recording.run.is_simulated and all(time is not None for time in times)


def align_clocks(calls: Mapping[int, Sequence[Collective]]) -> dict[int, int]:
    """Nanoseconds to add to each rank's clock; ranks that never meet keep their own.

    All calls must have times: see `has_clock`.
    """
    # Ranks disagree on clocks, so align on the first collective they share, not on time.
    meetings = {rank: _first_meetings(mine) for rank, mine in calls.items()}
    attendants: dict[Meeting, list[int]] = defaultdict(list)
    for rank in sorted(meetings):
        for meeting in meetings[rank]:
            attendants[meeting].append(rank)
    offsets: dict[int, int] = {}
    for start in sorted(calls):
        if start not in offsets:
            offsets[start] = 0
            _spread_from(start, offsets, meetings, attendants)
    return offsets


def _first_meetings(calls: Sequence[Collective]) -> dict[Meeting, int]:
    """When a rank first took part in each thing it shares with others, in that order."""
    first: dict[Meeting, int] = {}
    for call in sorted(calls, key=lambda call: call.order):
        first.setdefault(_meeting(call), call.start_ns or 0)
    return first


def _meeting(call: Collective) -> Meeting:
    if call.kind == CollectiveKind.SEND and call.peer is not None:
        return call.group, call.rank, call.peer
    if call.kind == CollectiveKind.RECV and call.peer is not None:
        return call.group, call.peer, call.rank
    return call.group, -1, -1


def _spread_from(
    start: int,
    offsets: dict[int, int],
    meetings: dict[int, dict[Meeting, int]],
    attendants: dict[Meeting, list[int]],
) -> None:
    waiting = deque([start])
    done: set[Meeting] = set()
    while waiting:
        rank = waiting.popleft()
        for meeting, start_ns in meetings[rank].items():
            if meeting in done:
                continue
            done.add(meeting)
            for other in attendants[meeting]:
                if other not in offsets:
                    offsets[other] = offsets[rank] + start_ns - meetings[other][meeting]
                    waiting.append(other)
