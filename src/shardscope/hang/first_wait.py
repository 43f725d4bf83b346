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
    after, anchor = _list_recent(run, peer, rank)
    num_transfers = {CollectiveKind.SEND: 0, CollectiveKind.RECV: 0}
    for call, is_candidate in after:
        if call.kind in num_transfers:
            num_transfers[call.kind] += 1
            num_done = _count_transfers(run, rank, call, anchor)
            if is_candidate and num_done < num_transfers[call.kind]:
                return call
        elif is_candidate and not _has_completed(run, rank, call):
            return call
    return None


def _list_recent(
    run: HangRun, peer: int, rank: int
) -> tuple[list[tuple[DumpedCall, bool]], DumpedCall | None]:
    """A peer's calls since the last collective that is done of the largest group of a rank.

    The second of each pair says whether the call came after all that the two have done together.
    With the calls comes that collective, from which transfers of all ranks are counted.
    """
    largest = max(len(group.members) for group in run.groups.values() if rank in group.members)
    recent: list[tuple[DumpedCall, bool]] = []
    is_candidate = True
    for step in reversed(list_steps(run, peer)):
        group = run.groups[step.group]
        call = group.columns[peer].make_call(step.index)
        if rank in group.members and call.kind not in P2P_KINDS and call.state is CallState.DONE:
            is_candidate = False
            if len(group.members) == largest:
                return recent[::-1], call
        recent.append((call, is_candidate))
    return recent[::-1], None


def _has_completed(run: HangRun, rank: int, call: DumpedCall) -> bool:
    """Whether a rank has done the collective that a peer did, in its own group of that role."""
    axis = run.groups[call.group].axis
    for group in _list_groups(run, rank, axis):
        done = max((columns.columns.num_done or 0 for columns in group.columns.values()), default=0)
        if done > call.group_order:
            return True
    return False


def _count_transfers(run: HangRun, rank: int, call: DumpedCall, anchor: DumpedCall | None) -> int:
    """How many transfers with a rank other ranks have completed since a collective of all."""
    opposite = CollectiveKind.RECV if call.kind is CollectiveKind.SEND else CollectiveKind.SEND
    count = 0
    for group in _list_groups(run, rank, run.groups[call.group].axis):
        for other, columns in group.columns.items():
            first = _find_order(run, other, anchor)
            for index, position in enumerate(columns.positions):
                if position >= 0 or columns.orders[index] <= first:
                    continue
                signature = columns.signatures[columns.signature_ids[index]]
                is_done = columns.columns.states[index] == CallState.DONE
                count += is_done and signature.kind is opposite and signature.peer == rank
    return count


def _find_order(run: HangRun, rank: int, call: DumpedCall | None) -> int:
    """Which of a rank's calls the same collective was; -1 if it is none of them."""
    own = None if call is None else run.groups[call.group].calls.get(rank)
    same = None if own is None or call is None else own.collectives.get(call.group_order)
    return -1 if same is None else same.order


def _list_groups(run: HangRun, rank: int, axis: str) -> Iterator[RunGroup]:
    return (group for group in run.groups.values() if group.axis == axis and rank in group.members)
