"""Calls that have been issued and have not completed, where dumps record that."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from msgspec import Struct

from shardscope.hang.evidence import CallState
from shardscope.hang.groups import RunGroup

_PENDING = bytes([CallState.ISSUED, CallState.STARTED, CallState.FAILED])


class PendingCall(Struct, frozen=True, order=True, gc=False):
    """A call of a rank; they are sorted by the order in which the rank issued them."""

    order: int
    group: str
    position: int
    index: int  # in the columns of the rank in the group
    state: CallState


def list_pending(groups: Mapping[str, RunGroup]) -> dict[int, list[PendingCall]]:
    """The collectives of each rank that have not completed, the oldest first."""
    pending: defaultdict[int, list[PendingCall]] = defaultdict(list)
    for name, group in groups.items():
        for rank, columns in group.columns.items():
            states = columns.columns.states
            if not any(state in states for state in _PENDING):
                continue
            done = columns.columns.num_done or 0
            for index, state in enumerate(states):
                position = columns.positions[index]
                if state in _PENDING and position >= done:
                    call = PendingCall(
                        columns.orders[index], name, position, index, CallState(state)
                    )
                    pending[rank].append(call)
    return {rank: sorted(calls) for rank, calls in pending.items()}


def find_stuck_calls(
    groups: Mapping[str, RunGroup], pending: Mapping[int, list[PendingCall]]
) -> list[tuple[RunGroup, int]]:
    """Collectives, as group and position, that are the oldest pending call of all their ranks.

    No rank is missing there, and none waits for another call first: they are stuck in themselves.
    """
    stuck = []
    for group in groups.values():
        heads = {
            (pending[rank][0].group, pending[rank][0].position) if pending.get(rank) else None
            for rank in group.members
        }
        if len(heads) == 1 and len(group.members) > 1:
            (head,) = heads
            if head is not None and head[0] == group.name:
                stuck.append((group, head[1]))
    return stuck
