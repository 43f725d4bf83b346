"""Collectives of several groups that simulated ranks issue in orders that wait for each other.

Ranks that run one after the other never wait. Here their collectives are replayed: each returns
when all ranks of its group that were run have come to it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from shardscope.hang import P2P_KINDS
from shardscope.launch.decisions import Decisions
from shardscope.record import Collective, Recording


def find_waiting(recording: Recording, decisions: Mapping[int, Decisions]) -> dict[int, Collective]:
    """The collective in which each rank waits forever; empty if all come to their end.

    Only where ranks of a group differ in order: a rank that has ended is no reason to wait here.
    """
    queues = _list_awaited(recording, decisions)
    places = dict.fromkeys(queues, 0)
    members: defaultdict[tuple[str, int], set[int]] = defaultdict(set)
    for rank, calls in queues.items():
        for call, position in calls:
            members[call.group, position].add(rank)
    arrived: defaultdict[tuple[str, int], set[int]] = defaultdict(set)
    ready = list(queues)
    while ready:
        rank = ready.pop()
        if places[rank] >= len(queues[rank]):
            continue
        call, position = queues[rank][places[rank]]
        key = call.group, position
        arrived[key].add(rank)
        if arrived[key] == members[key]:
            for member in members[key]:
                places[member] += 1
            ready.extend(members[key])
    return {
        rank: calls[places[rank]][0] for rank, calls in queues.items() if places[rank] < len(calls)
    }


def _list_awaited(
    recording: Recording, decisions: Mapping[int, Decisions]
) -> dict[int, Sequence[tuple[Collective, int]]]:
    """Of each rank the collectives that it waits for, with their positions in their groups."""
    unawaited = {rank: set(own.unawaited) for rank, own in decisions.items()}
    counts: Counter[tuple[int, str]] = Counter()
    queues: defaultdict[int, list[tuple[Collective, int]]] = defaultdict(list)
    for call in sorted(recording.collectives, key=lambda call: (call.rank, call.order)):
        if call.kind in P2P_KINDS:
            continue
        position = counts[call.rank, call.group]
        counts[call.rank, call.group] += 1
        if not call.thread and call.order not in unawaited.get(call.rank, ()):
            queues[call.rank].append((call, position))
    return dict(queues)
