"""Finds the cause of a hang: a rank that others wait for, or ranks that wait for each other.

A stream contains each collective before it is issued, so the last record of a killed rank is the
collective in which it was stuck. A rank that issued a collective waits for the ranks of its group
that did not, and a receive waits for its send. In the graph of these waits, a rank that waits for
no other is behind, and a cycle is a deadlock.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import final

from shardscope.hang.rank_calls import (
    GroupCalls,
    Wait,
    Waiting,
    describe_call,
    find_cycle,
    find_drift,
    find_unsent,
    is_blocking_transfer,
    line_of,
    name_ranks,
    replay_receives,
    returns_alone,
    sort_by_group,
    sort_by_route,
)
from shardscope.record.base import CollectiveKind
from shardscope.record.ranks import RankSpan, count_ranks, expand_ranks
from shardscope.record.recording import Collective, Finding, Gap, Recording, Severity

DEADLOCK = "deadlock"
RANK_BEHIND = "rank-behind"

_UNKNOWN_TAGS = "tags are not recorded"  # how a gap about a send and a receive ends

_MAX_NAMED = 4  # waits, positions and edges of a cycle that a sentence lists
# Backends whose collectives block until they are done, unless async_op=True.
_BLOCKING_BACKENDS = ("gloo", "mpi")
# Errors by which a user, a scheduler or a launcher ends a rank that hangs.
_INTERRUPTIONS = ("KeyboardInterrupt", "SystemExit", "SignalException")


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
            return [_explain_cycle(cycle, waiting)]
    return _Hang(recording, groups, diverged).find() if recording.stops else []


@final
class _Hang:
    """The waits in a run in which at least one rank was killed or raised an error."""

    def __init__(
        self, recording: Recording, groups: dict[str, GroupCalls], diverged: dict[str, int]
    ) -> None:
        self._recording = recording
        self._groups = groups
        self._stops = {stop.rank: stop for stop in recording.stops}
        self._last: dict[int, Collective] = {}  # by rank
        self._last_on_thread: dict[tuple[int, str], Collective] = {}
        for call in sorted(recording.collectives, key=lambda call: call.order):
            self._last[call.rank] = call
            self._last_on_thread[call.rank, call.thread] = call
        # Ranks that stopped because of a mismatch, which has a finding of its own.
        self._explained: set[int] = set()
        self._waits = list(self._find_waits(diverged))

    def find(self) -> list[Finding]:
        """A certain deadlock, else the ranks that are behind, else a likely deadlock."""
        certain, likely = self._sort_waits()
        cycle = find_cycle(certain)
        if cycle is not None:
            return [_explain_cycle(cycle, certain, also=likely)]
        missing = {rank for wait in self._waits for rank in wait.missing}
        behind = sorted(missing.intersection(self._stops).difference(likely, self._explained))
        if behind:
            return [self._explain_behind(behind, likely)]
        cycle = find_cycle(likely)
        if cycle is not None:
            return [_explain_cycle(cycle, likely, is_certain=False)]
        return [] if likely or self._explained else self._suspect_unrecorded()

    def _find_waits(self, diverged: dict[str, int]) -> Iterator[Wait]:
        for name, group in self._groups.items():
            complete = {rank: calls for rank, calls in group.items() if calls.is_known}
            first = min((calls.num_collectives for calls in complete.values()), default=None)
            if first is None:
                continue
            if name in diverged and diverged[name] <= first <= diverged[name] + 1:
                self._explained.update(group)  # all ranks stopped at the mismatch
            else:
                waiters = {
                    rank: calls.collectives[first]
                    for rank, calls in group.items()
                    if first in calls.collectives
                }
                if waiters and not self._is_over(waiters, group):
                    missing = tuple(rank for rank in complete if rank not in waiters)
                    yield Wait(name, first, waiters, missing)
            for wait in _find_transfer_waits(name, group):
                if not self._is_over(wait.waiters, group):
                    yield wait

    def _is_over(self, waiters: Iterable[int], group: GroupCalls) -> bool:
        """Whether a rank that issued the collective continued to the end of its trace.

        Then the other ranks issued it too, and their recordings were truncated afterwards.
        """
        is_real = not self._recording.run.is_simulated
        return is_real and any(group[rank].is_finished for rank in waiters)

    def _sort_waits(self) -> tuple[Waiting, Waiting]:
        """The waits that each rank is certainly in, and all waits that it may be in."""
        certain: Waiting = defaultdict(list)
        likely: Waiting = defaultdict(list)
        seen_ns = self._find_last_activity()
        blocking = {
            group.name for group in self._recording.groups if group.backend in _BLOCKING_BACKENDS
        }
        for wait in self._waits:
            for rank, call in wait.waiters.items():
                if rank not in self._stops or rank in self._explained:
                    continue
                last = self._last_on_thread[rank, call.thread]
                last_ns = last.start_ns or 0
                if wait.group in blocking and seen_ns.get((rank, call.thread), 0) > last_ns:
                    continue  # asynchronous: the thread entered or left a phase afterwards
                likely[rank].append(wait)
                if wait.blocks(last) and not returns_alone(last):
                    certain[rank].append(wait)
        return certain, likely

    def _find_last_activity(self) -> dict[tuple[int, str], int]:
        """The time, on the rank's clock, when each thread of a killed rank last changed phase.

        Ranks that raised are left out: the error made them leave their phases.
        """
        seen_ns: defaultdict[tuple[int, str], int] = defaultdict(int)
        killed = {rank for rank, stop in self._stops.items() if stop.error is None}
        for span in self._recording.spans:
            if span.device == "cpu" and span.rank in killed:
                key = (span.rank, span.thread)
                seen_ns[key] = max(seen_ns[key], span.start_ns + span.duration_ns)
        for stop in self._stops.values():
            for begin in stop.open_spans:
                key = (stop.rank, begin.thread)
                seen_ns[key] = max(seen_ns[key], begin.start_ns)
        return seen_ns

    def _explain_behind(self, behind: list[int], likely: Waiting) -> Finding:
        direct = [wait for wait in self._waits if not set(behind).isdisjoint(wait.missing)]
        waiters = {rank for wait in direct for rank in wait.waiters}
        facts = [f"{name_ranks(behind)} {'is' if len(behind) == 1 else 'are'} behind"]
        facts.extend(_describe_waiters(wait) for wait in direct[:_MAX_NAMED])
        if len(direct) > _MAX_NAMED:
            facts.append(f"{len(direct) - _MAX_NAMED:,} more collectives wait for them")
        if rest := set(likely) - waiters:
            facts.append(f"{name_ranks(rest)} {_verb(rest)} for those in turn")
        facts.extend(self._describe_states(behind))
        collective = next((wait for wait in direct if wait.position is not None), None)
        if collective is not None:
            waiting_ranks = sorted(collective.waiters)[:_MAX_NAMED]
            drift = find_drift(self._groups[collective.group], collective.missing[0], waiting_ranks)
            facts.extend([drift] if drift else [])
        has_raised = any(_is_failure(self._stops[rank].error) for rank in behind)
        has_failed_others = any(
            _is_failure(self._stops[rank].error) for rank in waiters if rank in self._stops
        )
        last = self._last.get(behind[0])
        return Finding(
            rule=RANK_BEHIND,
            severity=Severity.ERROR if has_raised or has_failed_others else Severity.WARNING,
            subject=_name_groups(direct),
            fact="; ".join(facts),
            remedy=_suggest_remedy(behind, last, has_raised=has_raised, is_over=has_failed_others),
            rank=behind[0],
            source=None if last is None else last.source,
        )

    def list_possible_pairs(self) -> Iterator[tuple[Collective, Collective]]:
        """Blocking sends and receives that are the last calls of their ranks and may match."""
        waiters = {rank for wait in self._waits for rank in wait.waiters}
        blocked = {
            rank: call
            for rank, call in self._last.items()
            if rank in self._stops
            and rank not in waiters
            and call.group in self._groups
            and is_blocking_transfer(call)
        }
        seen_ns = self._find_last_activity()
        sends: dict[tuple[str, int | None], list[Collective]] = defaultdict(list)
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

    def _describe_states(self, ranks: list[int]) -> Iterator[str]:
        """The last collective of each rank; ranks with the same one are listed together."""
        ranks_by_state: dict[str, list[int]] = {}
        for rank in ranks:
            ranks_by_state.setdefault(self._describe_state(rank), []).append(rank)
        for state, ranks_there in list(ranks_by_state.items())[:_MAX_NAMED]:
            yield f"{name_ranks(ranks_there)} {state}"
        num_more = sum(map(len, list(ranks_by_state.values())[_MAX_NAMED:]))
        if num_more:
            yield f"{num_more:,} more {'rank' if num_more == 1 else 'ranks'} stopped elsewhere"

    def _describe_state(self, rank: int) -> str:
        stop, last = self._stops[rank], self._last.get(rank)
        if last is None:
            state = "issued no collective"
        else:
            state = f"last issued {describe_call(last)} in group {last.group}"
        if stop.error is not None:
            return f"{state}, then raised {stop.error}"
        phases = [begin.name for begin in stop.open_spans if not begin.thread]
        where = f" in phase {' > '.join(phases)}" if phases else ""
        return f"{state} before the recording stops{where}"

    def _suspect_unrecorded(self) -> list[Finding]:
        """A group in which all recorded ranks stopped, and whose other ranks have no recording."""
        members = {group.name: group.ranks for group in self._recording.groups}
        for name, group in self._groups.items():
            recorded = [rank for rank, calls in group.items() if calls.is_known]
            unknown = _find_unknown(members.get(name, ()), recorded)
            if not unknown or any(
                rank not in self._stops or rank not in self._last or self._last[rank].group != name
                for rank in recorded
            ):
                continue
            last = self._last[recorded[0]]
            has_files = any(rank in group for rank in unknown)
            fact = (
                f"{name_ranks(recorded)} stopped after issuing {describe_call(last)} at position "
                f"{group[recorded[0]].num_collectives - 1} of group {name}; {name_ranks(unknown)}, "
                f"which must issue it too, left no {'complete ' if has_files else ''}recording "
                "and may be behind"
            )
            return [
                Finding(
                    rule=RANK_BEHIND,
                    severity=Severity.WARNING,
                    subject=f"group {name}",
                    fact=fact,
                    remedy=f"Read the log of {name_ranks(unknown)}, and merge the recording again "
                    "with the others if it can be found.",
                    rank=unknown[0],
                    source=last.source,
                )
            ]
        return []


def _find_transfer_waits(name: str, group: GroupCalls) -> Iterator[Wait]:
    """Receives without a send, and sends without a receive."""
    sends, receives, from_anyone = sort_by_route(group)
    for route in sorted(sends.keys() | receives.keys()):
        sender, receiver = route
        num_sent, num_received = len(sends[route]), len(receives[route])
        if sender not in group or receiver not in group:
            continue
        if num_received > num_sent and group[sender].is_known:
            yield Wait(name, None, {receiver: receives[route][num_sent]}, (sender,))
        elif receiver in from_anyone:
            continue  # a receive from any rank may match any send to its rank
        elif num_sent > num_received and group[receiver].is_known:
            yield Wait(name, None, {sender: sends[route][num_received]}, (receiver,))
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
    blocking = {group.name for group in recording.groups if group.backend in _BLOCKING_BACKENDS}
    hang = _Hang(recording, {name: groups[name] for name in blocking.intersection(groups)}, {})
    pairs: dict[str, list[tuple[Collective, Collective]]] = defaultdict(list)
    for send, receive in hang.list_possible_pairs():
        pairs[send.group].append((send, receive))
    return [_describe_pairs(name, group_pairs) for name, group_pairs in sorted(pairs.items())]


def _describe_pairs(group: str, pairs: list[tuple[Collective, Collective]]) -> Gap:
    send, receive = pairs[0]
    more = f" (and {len(pairs) - 1:,} more such pairs)" if len(pairs) > 1 else ""
    return Gap(
        place=f"group {group}",
        fact=f"rank {send.rank} stopped after issuing {describe_call(send)} and rank "
        f"{receive.rank} after issuing {describe_call(receive)}{more}: if their tags differ, the "
        f"two ranks wait for each other; {_UNKNOWN_TAGS}",
    )


def _find_unknown(members: tuple[RankSpan, ...], recorded: list[int]) -> list[int]:
    """Members without a complete recording, if they are a minority of the group."""
    if count_ranks(members) >= 2 * len(recorded):
        return []
    return sorted(set(expand_ranks(members)).difference(recorded))


def _explain_cycle(
    cycle: list[int], waiting: Waiting, *, also: Iterable[int] = (), is_certain: bool = True
) -> Finding:
    """The finding for a cycle of waits; `also` are further ranks that wait."""
    calls: list[Collective] = []
    waits: list[Wait] = []
    edges: list[str] = []
    for rank, target in zip(cycle, (*cycle[1:], cycle[0]), strict=True):
        wait = next(wait for wait in waiting[rank] if target in wait.missing)
        calls.append(wait.waiters[rank])
        waits.append(wait)
        edges.append(f"rank {rank} waits for rank {target} in {_describe_wait(wait, rank)}")
    if len(edges) > _MAX_NAMED:
        edges[_MAX_NAMED - 1 : -1] = [f"… {len(edges) - _MAX_NAMED:,} more …"]
    is_receives = all(call.kind is CollectiveKind.RECV for call in calls)
    cycle_words = "a deadlock of receives" if is_receives else "a deadlock"
    hedge = "" if is_certain else ", unless one of them was busy elsewhere when it stopped"
    fact = f"{cycle_words}: {'; '.join(edges)}{hedge}"
    if rest := {*waiting, *also} - set(cycle):
        fact += f"; {name_ranks(rest)} {_verb(rest)} too"
    return Finding(
        rule=DEADLOCK,
        severity=Severity.ERROR if is_certain else Severity.WARNING,
        subject=f"{name_ranks(cycle)}, {_name_groups(waits)}",  # of several ranks: no `rank`
        fact=fact,
        remedy=_suggest_order(calls),
        source=calls[0].source,
    )


def _suggest_order(calls: list[Collective]) -> str:
    kinds = {call.kind for call in calls}
    if kinds == {CollectiveKind.RECV}:
        return (
            "Let one of these ranks send before it receives, or issue sends and receives together "
            "with batch_isend_irecv."
        )
    if kinds <= {CollectiveKind.SEND, CollectiveKind.RECV}:
        return (
            "Order the transfers so that each send meets its receive, or issue them together with "
            "batch_isend_irecv."
        )
    return "Issue the collectives and transfers of these groups in the same order on every rank."


def _suggest_remedy(
    behind: list[int], last: Collective | None, *, has_raised: bool, is_over: bool
) -> str:
    names = name_ranks(behind)
    if has_raised:
        return f"Fix what {names} raised first: the other ranks only waited for it."
    line = line_of(last)
    where = f"after {line}" if line else "before its first collective"
    if is_over:
        return (
            f"Find out in the log of {names} why it ended or was stuck {where} (out of memory?): "
            "the errors of the other ranks follow from it."
        )
    return (
        f"Look at what {names} did {where}: every rank of the group must issue the same "
        "collectives. If the run was killed while it still made progress, this is only where it "
        "was slowest."
    )


def _describe_waiters(wait: Wait) -> str:
    ranks = sorted(wait.waiters)
    words = _describe_wait(wait, ranks[0])
    missing = name_ranks(wait.missing)
    if wait.is_any:
        missing = f"any of {name_ranks(set(wait.missing).difference(ranks) or ranks)}"
    return f"{name_ranks(ranks)} {_verb(ranks)} for {missing} in {words}"


def _describe_wait(wait: Wait, rank: int) -> str:
    location = "in" if wait.position is None else f"at position {wait.position} of"
    return f"{describe_call(wait.waiters[rank])} {location} group {wait.group}"


def _name_groups(waits: Iterable[Wait]) -> str:
    names = list(dict.fromkeys(wait.group for wait in waits))
    more = f" and {len(names) - _MAX_NAMED:,} more" if len(names) > _MAX_NAMED else ""
    return f"group{'s' if len(names) > 1 else ''} {', '.join(names[:_MAX_NAMED])}{more}"


def _verb(ranks: Iterable[int]) -> str:
    return "waits" if len(set(ranks)) == 1 else "wait"


def _is_failure(error: str | None) -> bool:
    """Whether the rank failed by itself and was not interrupted."""
    return error is not None and not error.startswith(_INTERRUPTIONS)
