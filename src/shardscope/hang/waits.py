"""Finds the cause of a hang: a rank that others wait for, or ranks that wait for each other.

A stream contains each collective before it is issued, so the last record of a killed rank is the
collective in which it was stuck. A rank that issued a collective waits for the ranks of its group
that did not, and a receive waits for its send. In the graph of these waits, a rank that waits for
no other is behind, and a cycle is a deadlock. `wait_text.py` says it in sentences.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from enum import StrEnum
from typing import final

from msgspec import Struct

from shardscope.hang.dumped_calls import DumpedCall
from shardscope.hang.evidence import CallState, find_last_activity
from shardscope.hang.rank_calls import (
    GroupCalls,
    IssuedCall,
    Wait,
    Waiting,
    find_cycle,
    find_unsent,
    is_blocking_transfer,
    replay_receives,
    returns_alone,
    sort_by_group,
    sort_by_route,
)
from shardscope.hang.wait_text import (
    describe_pairs,
    explain_behind,
    explain_cycle,
    explain_unrecorded,
)
from shardscope.record.base import CollectiveKind
from shardscope.record.ranks import RankSpan, count_ranks, expand_ranks
from shardscope.record.recording import Finding, Gap, Recording, Stop

_UNKNOWN_TAGS = "tags are not recorded"  # how a gap about a send and a receive ends

# Backends whose collectives block until they are done, unless async_op=True.
BLOCKING_BACKENDS = ("gloo", "mpi")


class RunState(Struct, frozen=True):
    """Where the ranks of a run stopped: what the search for waits reads besides the calls.

    `last` is the last call of each rank, `last_on_thread` of each of its threads. `seen_ns` is the
    time, on the rank's clock, when a thread last entered or left a phase. `blocking` are groups
    whose collectives return when they are done. `busy` are ranks known to be outside of any wait,
    `stuck` those whose oldest call is the oldest of all ranks of its group, and completes on none.
    """

    stops: Mapping[int, Stop]
    last: Mapping[int, IssuedCall]
    last_on_thread: Mapping[tuple[int, str], IssuedCall]
    members: Mapping[str, tuple[RankSpan, ...]]
    blocking: frozenset[str] = frozenset()
    seen_ns: Mapping[tuple[int, str], int] = {}
    busy: frozenset[int] = frozenset()
    stuck: frozenset[int] = frozenset()
    is_simulated: bool = False


class HangKind(StrEnum):
    """What the graph of waits shows."""

    BEHIND = "behind"  # ranks that others wait for do not wait themselves
    CYCLE = "cycle"  # ranks wait for each other
    UNRECORDED = "unrecorded"  # all recorded ranks wait; the others of the group left nothing
    STUCK = "stuck"  # the ranks that others wait for are in a call that all have issued


class HangState(Struct, frozen=True):
    """The waits of a run, and the ranks at which they end.

    `ranks` are those behind, those of the cycle in order, or those without a recording. `certain`
    and `likely` are the waits that each rank is certainly in, and may be in.
    """

    kind: HangKind
    ranks: list[int]
    waits: list[Wait]
    certain: Waiting
    likely: Waiting
    is_certain: bool = True


def find_hang(
    recording: Recording, groups: dict[str, GroupCalls], diverged: dict[str, int]
) -> list[Finding]:
    """At most one finding: ranks that wait for each other, or the ranks that others wait for.

    `diverged` maps groups whose ranks issued different collectives to the position of the first
    mismatch, which has a finding of its own; later waits of that group follow from it. A simulated
    run does not hang: for it, receives that would block forever on real ranks are reported.
    """
    if count_ranks(recording.run.ranks) < 2:
        return []
    if recording.run.is_simulated:
        waiting = replay_receives(recording, groups)
        cycle = find_cycle(waiting)
        if cycle is not None:
            return [explain_cycle(cycle, waiting)]
    if not recording.stops:
        return []
    run = read_run_state(recording)
    state = find_hang_state(run, groups, diverged)
    return [] if state is None else [explain_hang(state, run, groups)]


def explain_hang(state: HangState, run: RunState, groups: Mapping[str, GroupCalls]) -> Finding:
    """The finding for ranks that wait."""
    match state.kind:
        case HangKind.CYCLE:
            if state.is_certain:
                return explain_cycle(state.ranks, state.certain, also=state.likely)
            return explain_cycle(state.ranks, state.likely, is_certain=False)
        case HangKind.BEHIND:
            waiting = set(state.likely)
            return explain_behind(state.ranks, state.waits, waiting, run.stops, run.last, groups)
    wait = state.waits[0]
    return explain_unrecorded(wait, list(wait.missing), groups[wait.group])


def read_run_state(recording: Recording) -> RunState:
    """Where the ranks of a recording stopped."""
    last: dict[int, IssuedCall] = {}
    last_on_thread: dict[tuple[int, str], IssuedCall] = {}
    for call in sorted(recording.collectives, key=lambda call: call.order):
        last[call.rank] = call
        last_on_thread[call.rank, call.thread] = call
    stops = {stop.rank: stop for stop in recording.stops}
    return RunState(
        stops=stops,
        last=last,
        last_on_thread=last_on_thread,
        members={group.name: group.ranks for group in recording.groups},
        blocking=frozenset(
            group.name for group in recording.groups if group.backend in BLOCKING_BACKENDS
        ),
        seen_ns=find_last_activity(recording, stops),
        is_simulated=recording.run.is_simulated,
    )


def find_hang_state(
    run: RunState, groups: Mapping[str, GroupCalls], diverged: Mapping[str, int]
) -> HangState | None:
    """The waits of a run in which ranks stopped; None if none of them waits."""
    return _Hang(run, groups, diverged).find()


@final
class _Hang:
    """The waits in a run in which at least one rank was killed or raised an error."""

    def __init__(
        self, run: RunState, groups: Mapping[str, GroupCalls], diverged: Mapping[str, int]
    ) -> None:
        self._run = run
        self._groups = groups
        self._stops = run.stops
        # Ranks that stopped because of a mismatch, which has a finding of its own.
        self._explained: set[int] = set()
        self._waits = list(self._find_waits(diverged))

    def find(self) -> HangState | None:
        """A certain deadlock, else the ranks that are behind, else a likely deadlock."""
        certain, likely = self._sort_waits()
        cycle = find_cycle(certain)
        if cycle is not None:
            return HangState(HangKind.CYCLE, cycle, self._waits, certain, likely)
        unrecorded = [] if self._explained else self._find_unrecorded()
        stuck = {rank for wait in unrecorded for rank in wait.waiters}.difference(self._run.busy)
        missing = {rank for wait in self._waits for rank in wait.missing}
        behind = missing.intersection(self._stops).difference(likely, self._explained, stuck)
        if blocked := behind & self._run.stuck:
            behind -= blocked
            if not behind:
                ranks = sorted(blocked)
                return HangState(HangKind.STUCK, ranks, self._waits, certain, likely)
        if behind:
            return HangState(HangKind.BEHIND, sorted(behind), self._waits, certain, likely)
        cycle = find_cycle(likely)
        if cycle is not None:
            return HangState(HangKind.CYCLE, cycle, self._waits, certain, likely, is_certain=False)
        if not unrecorded:
            return None
        ranks = sorted({rank for wait in unrecorded for rank in wait.missing})
        waits = [*sorted(unrecorded, key=_began_at), *self._waits]
        return HangState(HangKind.UNRECORDED, ranks, waits, certain, likely, is_certain=False)

    def _find_waits(self, diverged: Mapping[str, int]) -> Iterator[Wait]:
        for name, group in self._groups.items():
            complete = {rank: calls for rank, calls in group.items() if calls.is_known}
            first = min((calls.num_collectives for calls in complete.values()), default=None)
            if first is None:
                continue
            if name in diverged and diverged[name] <= first <= diverged[name] + 1:
                self._explained.update(group)  # all ranks stopped at the mismatch
            else:
                waiters = _find_waiters(name, group, first)
                if waiters and not self._is_over(waiters, group):
                    missing = tuple(
                        rank for rank, calls in complete.items() if calls.num_collectives <= first
                    )
                    yield Wait(name, first, waiters, missing)
            for wait in _find_transfer_waits(name, group):
                if not self._is_over(wait.waiters, group):
                    yield wait

    def _is_over(self, waiters: Iterable[int], group: GroupCalls) -> bool:
        """Whether a rank that issued the collective continued to the end of its trace.

        Then the other ranks issued it too, and their recordings were truncated afterwards.
        """
        is_real = not self._run.is_simulated
        return is_real and any(group[rank].is_finished for rank in waiters)

    def _sort_waits(self) -> tuple[Waiting, Waiting]:
        """The waits that each rank is certainly in, and all waits that it may be in."""
        certain: Waiting = defaultdict(list)
        likely: Waiting = defaultdict(list)
        run = self._run
        for wait in self._waits:
            for rank, call in wait.waiters.items():
                if rank not in self._stops or rank in self._explained or rank in run.busy:
                    continue
                last = run.last_on_thread.get((rank, call.thread), call)
                last_ns = last.start_ns or 0
                if wait.group in run.blocking and run.seen_ns.get((rank, call.thread), 0) > last_ns:
                    continue  # asynchronous: the thread entered or left a phase afterwards
                likely[rank].append(wait)
                if _is_pending(call) or (wait.blocks(last) and not returns_alone(last)):
                    certain[rank].append(wait)
        return certain, likely

    def list_possible_pairs(self) -> Iterator[tuple[IssuedCall, IssuedCall]]:
        """Blocking sends and receives that are the last calls of their ranks and may match."""
        waiters = {rank for wait in self._waits for rank in wait.waiters}
        blocked = {
            rank: call
            for rank, call in self._run.last.items()
            if rank in self._stops
            and rank not in waiters
            and call.group in self._groups
            and is_blocking_transfer(call)
        }
        seen_ns = self._run.seen_ns
        sends: dict[tuple[str, int | None], list[IssuedCall]] = defaultdict(list)
        for call in blocked.values():
            is_last = seen_ns.get((call.rank, call.thread), 0) <= (call.start_ns or 0)
            if call.kind is CollectiveKind.SEND and is_last:
                sends[call.group, call.peer].append(call)
        for receive in blocked.values():
            is_last = seen_ns.get((receive.rank, receive.thread), 0) <= (receive.start_ns or 0)
            if receive.kind is CollectiveKind.RECV and is_last:
                for send in sends[receive.group, receive.rank]:
                    if receive.peer in (None, send.rank):
                        yield send, receive

    def _find_unrecorded(self) -> list[Wait]:
        """Calls in which all recorded ranks of a group wait, so that an unrecorded one is missing.

        Only if few ranks of the run left nothing: else any of them may be.
        """
        waits = [
            wait
            for name, group in self._groups.items()
            for wait in (self._find_unrecorded_in(name, group), *self._find_unsent(name, group))
            if wait is not None
        ]
        recorded = {rank for group in self._groups.values() for rank in group}
        missing = {rank for wait in waits for rank in wait.missing}
        return waits if len(missing - recorded) < len(recorded) else []

    def _find_unrecorded_in(self, name: str, group: GroupCalls) -> Wait | None:
        recorded = {rank: calls for rank, calls in group.items() if calls.is_known}
        members = expand_ranks(self._run.members.get(name, ()))
        unknown = sorted(set(members).difference(recorded))
        if not unknown or not recorded:
            return None
        position = min(calls.num_collectives for calls in recorded.values()) - 1
        if any(calls.num_done for calls in recorded.values()):
            position = min(position, max(calls.num_done for calls in recorded.values()))
        waiters: dict[int, IssuedCall] = {}
        for rank, calls in recorded.items():
            call = calls.collectives.get(position)
            if call is None or calls.is_done(position) or not self._may_wait(rank, call):
                return None
            waiters[rank] = call
        return Wait(name, position, waiters, tuple(unknown))

    def _find_unsent(self, name: str, group: GroupCalls) -> Iterator[Wait]:
        """Sends and receives whose other end is a rank that left nothing."""
        unknown = set(expand_ranks(self._run.members.get(name, ()))).difference(group)
        for rank, calls in group.items() if unknown else ():
            for call in calls.transfers:
                if call.peer in unknown and self._may_wait(rank, call):
                    assert call.peer is not None
                    yield Wait(name, None, {rank: call}, (call.peer,))
                    break

    def _may_wait(self, rank: int, call: IssuedCall) -> bool:
        """Whether a rank is in a call, or may be because it is its last."""
        last = self._run.last.get(rank)
        is_last = last is not None and (last.group, last.order) == (call.group, call.order)
        return rank in self._stops and not _is_done(call) and (is_last or _is_pending(call))


def _began_at(wait: Wait) -> tuple[int, int]:
    """When the first rank began to wait, where calls have times; else most waiting ranks first."""
    times = [call.start_ns for call in wait.waiters.values() if call.start_ns]
    return min(times, default=2**63), -len(wait.waiters)


def _find_waiters(name: str, group: GroupCalls, position: int) -> dict[int, IssuedCall]:
    """Ranks that issued the collective at a position, which has not completed on them."""
    waiters: dict[int, IssuedCall] = {}
    for rank, calls in group.items():
        call = calls.collectives.get(position)
        if call is not None:
            if not calls.is_done(position) and not _is_done(call):
                waiters[rank] = call
        elif calls.num_issued > position and not calls.is_done(position):
            waiters[rank] = DumpedCall(rank, -1, name, position, None)
    return waiters


def _is_pending(call: IssuedCall) -> bool:
    """Whether a call is known not to have completed."""
    return isinstance(call, DumpedCall) and call.state in (
        CallState.ISSUED,
        CallState.STARTED,
        CallState.FAILED,
    )


def _is_done(call: IssuedCall) -> bool:
    return isinstance(call, DumpedCall) and call.state is CallState.DONE


def _find_transfer_waits(name: str, group: GroupCalls) -> Iterator[Wait]:
    """Receives without a send, and sends without a receive."""
    sends, receives, from_anyone = sort_by_route(group)
    for route in sorted(sends.keys() | receives.keys()):
        sender, receiver = route
        num_sent, num_received = len(sends[route]), len(receives[route])
        if sender not in group or receiver not in group:
            continue
        if num_received > num_sent and group[sender].is_known:
            call = receives[route][num_sent]
            if not _is_done(call):
                yield Wait(name, None, {receiver: call}, (sender,))
        elif receiver in from_anyone:
            continue  # a receive from any rank may match any send to its rank
        elif num_sent > num_received and group[receiver].is_known:
            call = sends[route][num_received]
            if not _is_done(call):
                yield Wait(name, None, {sender: call}, (receiver,))
    unsent = find_unsent(group)
    if unsent and not any(group[rank].is_finished for rank in unsent):
        yield Wait(name, None, unsent, tuple(group), is_any=True)


def is_about_tags(gap: Gap) -> bool:
    """Whether a gap is one of `find_unknown_waits`."""
    return gap.fact.endswith(_UNKNOWN_TAGS)


def find_unknown_waits(recording: Recording) -> list[Gap]:
    """Ranks that stopped in a send and in a receive of which only the tags say whether they match.

    NCCL ignores tags, and a simulated run does not wait.
    """
    if recording.run.is_simulated or not recording.stops:
        return []
    groups = sort_by_group(recording)
    run = read_run_state(recording)
    hang = _Hang(run, {name: groups[name] for name in run.blocking.intersection(groups)}, {})
    pairs: dict[str, list[tuple[IssuedCall, IssuedCall]]] = defaultdict(list)
    for send, receive in hang.list_possible_pairs():
        pairs[send.group].append((send, receive))
    return [
        describe_pairs(name, group_pairs, _UNKNOWN_TAGS)
        for name, group_pairs in sorted(pairs.items())
    ]
