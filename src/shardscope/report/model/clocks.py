"""Aligns the clocks of ranks, since each rank counts time from its own start."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence

from shardscope.record import Collective, CollectiveKind, Recording

# An event that several ranks share: the first call in a group, or the first send between two ranks.
SyncPoint = tuple[str, int, int]


def has_clock(recording: Recording) -> bool:
    """Whether collectives have measured times; those of a simulation are not measured."""
    times = (call.start_ns for call in recording.collectives)
    return not recording.run.is_simulated and all(time is not None for time in times)


def align_clocks(calls: Mapping[int, Sequence[Collective]]) -> dict[int, int]:
    """Return nanoseconds to add to each rank's clock; 0 for ranks that share no collective.

    All calls must have times: see `has_clock`.
    """
    # Ranks disagree on clocks, so align on the first collective they share, not on time.
    sync_points = {rank: _find_first_sync_points(rank_calls) for rank, rank_calls in calls.items()}
    participants: dict[SyncPoint, list[int]] = defaultdict(list)
    for rank in sorted(sync_points):
        for sync_point in sync_points[rank]:
            participants[sync_point].append(rank)
    offsets: dict[int, int] = {}
    for start in sorted(calls):
        if start not in offsets:
            offsets[start] = 0
            _propagate_offsets(start, offsets, sync_points, participants)
    return offsets


def _find_first_sync_points(calls: Sequence[Collective]) -> dict[SyncPoint, int]:
    """Map each sync point of a rank to the time of its first call, in order of issue."""
    first: dict[SyncPoint, int] = {}
    for call in sorted(calls, key=lambda call: call.order):
        first.setdefault(_find_sync_point(call), call.start_ns or 0)
    return first


def _find_sync_point(call: Collective) -> SyncPoint:
    if call.kind == CollectiveKind.SEND and call.peer is not None:
        return call.group, call.rank, call.peer
    if call.kind == CollectiveKind.RECV and call.peer is not None:
        return call.group, call.peer, call.rank
    return call.group, -1, -1


def _propagate_offsets(
    start: int,
    offsets: dict[int, int],
    sync_points: dict[int, dict[SyncPoint, int]],
    participants: dict[SyncPoint, list[int]],
) -> None:
    waiting = deque([start])
    done: set[SyncPoint] = set()
    while waiting:
        rank = waiting.popleft()
        for sync_point, start_ns in sync_points[rank].items():
            if sync_point in done:
                continue
            done.add(sync_point)
            for participant in participants[sync_point]:
                if participant not in offsets:
                    offsets[participant] = (
                        offsets[rank] + start_ns - sync_points[participant][sync_point]
                    )
                    waiting.append(participant)
