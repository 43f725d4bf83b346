"""Of the waits for a rank, the one that it would end first: where it is in its program.

What followed a rank's last calls in earlier steps says it. Of a rank without a dump, a rank that
waits for it in a collective runs the same program: the first of its calls that the missing rank has
not done, by what has completed on the others, is where that stopped.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from shardscope.hang.dumped_calls import DumpedCall
from shardscope.hang.evidence import CallState
from shardscope.hang.groups import RunGroup
from shardscope.hang.history import find_next, list_steps
from shardscope.hang.rank_calls import P2P_KINDS, IssuedCall, Wait
from shardscope.hang.run import HangRun
from shardscope.hang.waits import HangState
from shardscope.record.base import CollectiveKind

_MAX_TRIED = 4  # ranks whose next call is looked for


def find_wait(run: HangRun, state: HangState | None, ranks: Iterable[int]) -> Wait | None:
    """The first wait for these ranks: what they would issue next, else what began to wait first."""
    if state is None:
        return None
    ranks = sorted(set(ranks))
    found = [wait for wait in state.waits if not set(ranks).isdisjoint(wait.missing)]
    for rank in ranks[:_MAX_TRIED]:
        expected = find_next(run, rank) or _find_next_by_peer(run, rank, found)
        if expected is not None:
            axis = run.groups[expected.group].axis
            for wait in found:
                if run.groups[wait.group].axis == axis and _fits(wait, expected):
                    return wait
    collectives = [wait for wait in found if wait.position is not None]
    return min(collectives or found, key=_began_at, default=None)


def _fits(wait: Wait, expected: IssuedCall) -> bool:
    """Whether a rank that would issue a call next would end a wait by it."""
    return (expected.kind in P2P_KINDS) == (wait.position is None)


def _began_at(wait: Wait) -> tuple[int, int]:
    times = [call.start_ns for call in wait.waiters.values() if call.start_ns]
    return min(times, default=2**63), len(wait.waiters)


def _find_next_by_peer(run: HangRun, rank: int, waits: list[Wait]) -> DumpedCall | None:
    """The first call of a rank with the same program that a rank without a dump has not done."""
    collective = min((w for w in waits if w.position is not None), key=_began_at, default=None)
    if collective is None:
        return None
    peer = min(collective.waiters)
    after: list[DumpedCall] = []
    since = 0
    for step in reversed(list_steps(run, peer)):
        group = run.groups[step.group]
        call = group.columns[peer].make_call(step.index)
        if rank in group.members and call.kind not in P2P_KINDS and call.state is CallState.DONE:
            since = call.start_ns or 0
            break
        after.append(call)
    num_transfers = {CollectiveKind.SEND: 0, CollectiveKind.RECV: 0}
    for call in reversed(after):
        if call.kind in num_transfers:
            num_transfers[call.kind] += 1
            if _count_transfers(run, rank, call, since) < num_transfers[call.kind]:
                return call
        elif not _has_completed(run, rank, call):
            return call
    return None


def _has_completed(run: HangRun, rank: int, call: DumpedCall) -> bool:
    """Whether a rank has done the collective that a peer did, in its own group of that role."""
    axis = run.groups[call.group].axis
    for group in _list_groups(run, rank, axis):
        done = max((columns.columns.num_done or 0 for columns in group.columns.values()), default=0)
        if done > call.group_order:
            return True
    return False


def _count_transfers(run: HangRun, rank: int, call: DumpedCall, since_ns: int) -> int:
    """How many transfers with a rank other ranks have completed, which it must have issued too."""
    opposite = CollectiveKind.RECV if call.kind is CollectiveKind.SEND else CollectiveKind.SEND
    count = 0
    for group in _list_groups(run, rank, run.groups[call.group].axis):
        for columns in group.columns.values():
            for index, created_ns in enumerate(columns.created_ns):
                if columns.positions[index] >= 0 or created_ns < since_ns:
                    continue
                signature = columns.signatures[columns.signature_ids[index]]
                is_done = columns.columns.states[index] == CallState.DONE
                count += is_done and signature.kind is opposite and signature.peer == rank
    return count


def _list_groups(run: HangRun, rank: int, axis: str) -> Iterator[RunGroup]:
    return (group for group in run.groups.values() if group.axis == axis and rank in group.members)
