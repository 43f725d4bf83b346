"""Causes where all ranks have issued the same: an order between groups, a GPU, or the network."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from shardscope.hang.cause_text import describe_rank, find_source, make_cause
from shardscope.hang.evidence import CallState, EventKind
from shardscope.hang.rank_calls import (
    IssuedCall,
    Wait,
    Waiting,
    describe_call,
    find_cycle,
    name_ranks,
)
from shardscope.hang.run import HangRun
from shardscope.hang.skipped_calls import list_deviating
from shardscope.record.hang_records import CauseKind, Certainty, HangCause
from shardscope.record.text import excerpt

_PENDING = (CallState.ISSUED, CallState.STARTED, CallState.FAILED)


def explain_stuck(run: HangRun) -> Iterator[HangCause]:
    """What does not complete although no rank is missing; nothing if all calls are done."""
    pending = _list_pending(run)
    yield from _explain_order(run, pending)
    yield from _explain_unstarted(run, pending)
    yield from _explain_network(run, pending)


def _list_pending(run: HangRun) -> dict[int, list[tuple[int, str, int, int]]]:
    """Calls of each rank that have not completed: order, group, position and index."""
    pending: defaultdict[int, list[tuple[int, str, int, int]]] = defaultdict(list)
    for name, group in run.groups.items():
        for rank, columns in group.columns.items():
            done = columns.columns.num_done or 0
            for index, state in enumerate(columns.columns.states):
                position = columns.positions[index]
                if state in _PENDING and position >= done:
                    pending[rank].append((columns.orders[index], name, position, index))
    return {rank: sorted(calls) for rank, calls in pending.items()}


def _explain_order(
    run: HangRun, pending: dict[int, list[tuple[int, str, int, int]]]
) -> Iterator[HangCause]:
    """Ranks whose oldest pending calls are of different groups, so that each waits for another."""
    heads = {rank: calls[0] for rank, calls in pending.items()}
    queued = {
        rank: {(name, position) for _, name, position, _ in calls}
        for rank, calls in pending.items()
    }
    waiting: Waiting = {}
    for rank, (_, name, position, index) in heads.items():
        group = run.groups[name]
        behind = tuple(
            member
            for member in group.members
            if member in heads
            and heads[member][1:3] != (name, position)
            and (name, position) in queued[member]
        )
        if behind:
            call: IssuedCall = group.columns[rank].make_call(index)
            waiting[rank] = [Wait(name, position, {rank: call}, behind)]
    cycle = find_cycle(waiting)
    if cycle is None:
        return
    facts = []
    for rank, target in zip(cycle, (*cycle[1:], cycle[0]), strict=True):
        wait = next(wait for wait in waiting[rank] if target in wait.missing)
        facts.append(
            f"rank {rank} issued {describe_call(wait.waiters[rank])} in group {wait.group} first, "
            f"where rank {target} has others before it"
        )
    deviating = dict(list_deviating(run, cycle))
    ranks = sorted(deviating) if deviating and len(deviating) < len(cycle) else cycle
    wait = waiting[cycle[0]][0]
    yield make_cause(
        CauseKind.WRONG_ORDER,
        Certainty.LIKELY,
        ranks,
        ["all ranks have issued the same collectives, in different orders of their groups", *facts],
        evidence=[*deviating.values()],
        wait=wait,
        source=find_source(run, cycle[0]),
    )


def _explain_unstarted(
    run: HangRun, pending: dict[int, list[tuple[int, str, int, int]]]
) -> Iterator[HangCause]:
    """Ranks whose GPU has not begun a collective that has begun on the others."""
    by_call: defaultdict[tuple[str, int], dict[int, CallState]] = defaultdict(dict)
    for rank, calls in pending.items():
        for _, name, position, index in calls:
            state = CallState(run.groups[name].columns[rank].columns.states[index])
            by_call[name, position].setdefault(rank, state)
    for (name, position), states in sorted(by_call.items(), key=lambda item: item[0][1]):
        started = [rank for rank, state in states.items() if state is CallState.STARTED]
        waiting = [rank for rank, state in states.items() if state is CallState.ISSUED]
        if not started or not waiting or len(waiting) >= len(started):
            continue
        heads = [rank for rank in waiting if pending[rank][0][1:3] == (name, position)]
        if not heads:
            continue
        call = (
            run.groups[name]
            .columns[started[0]]
            .make_call(
                next(index for _, g, p, index in pending[started[0]] if (g, p) == (name, position))
            )
        )
        yield make_cause(
            CauseKind.SLOW,
            Certainty.LIKELY,
            heads,
            [
                f"all ranks have issued {describe_call(call)} at position {position} of group "
                f"{name}; it has begun on the GPUs of {name_ranks(started)}, and not on "
                f"{name_ranks(heads)}, whose GPU still works on something before it"
            ],
            evidence=[describe_rank(run, rank) for rank in heads[:3]],
            group=name,
            position=position,
            source=find_source(run, heads[0]),
            where="on its GPU before that",
        )
        return


def _explain_network(
    run: HangRun, pending: dict[int, list[tuple[int, str, int, int]]]
) -> Iterator[HangCause]:
    """A collective that all ranks have issued and that completes on none of them."""
    events = [
        (rank, event)
        for rank, files in run.ranks.items()
        for event in files.events
        if event.kind is EventKind.NETWORK
    ]
    evidence = [f"rank {rank}: {excerpt(event.text)}" for rank, event in events[:4]]
    evidence += [event.text for event in run.job_events if event.kind is EventKind.NETWORK][:2]
    failed = {
        (calls[0][1], calls[0][2])
        for rank, calls in pending.items()
        if _state_of(run, rank, calls[0]) is CallState.FAILED
    }
    stuck = _find_common(run, pending)
    if stuck is None:
        if evidence:
            ranks = sorted({rank for rank, _ in events})
            yield make_cause(
                CauseKind.NETWORK,
                Certainty.LIKELY,
                ranks,
                [f"NCCL reports errors of the network on {name_ranks(ranks)}"],
                evidence=evidence,
            )
        return
    name, position, call = stuck
    group = run.groups[name]
    is_known = bool(evidence) or (name, position) in failed
    yield make_cause(
        CauseKind.NETWORK if is_known else CauseKind.UNKNOWN,
        Certainty.LIKELY if evidence else Certainty.POSSIBLE,
        sorted({rank for rank, _ in events}) or group.members,
        [
            f"all ranks of group {name} have issued {describe_call(call)} at position {position}, "
            "and it has completed on none"
            + (
                ": what is wrong is below torch (a link, a GPU, a driver)"
                if is_known
                else ": it may have been under way when the files were written"
            )
        ],
        evidence=evidence,
        group=name,
        position=position,
        source=call.source,
    )


def _state_of(run: HangRun, rank: int, pending: tuple[int, str, int, int]) -> CallState:
    return CallState(run.groups[pending[1]].columns[rank].columns.states[pending[3]])


def _find_common(
    run: HangRun, pending: dict[int, list[tuple[int, str, int, int]]]
) -> tuple[str, int, IssuedCall] | None:
    """The oldest call that is pending on all ranks of its group, of several ranks."""
    for name, group in run.groups.items():
        ranks = [rank for rank in group.members if rank in group.columns]
        if len(ranks) < 2 or len(ranks) < len(group.members):
            continue
        firsts = set()
        for rank in ranks:
            own = [
                (position, index) for _, g, position, index in pending.get(rank, ()) if g == name
            ]
            if not own or own[0][0] < 0:
                break
            firsts.add(own[0][0])
        else:
            if len(firsts) == 1:
                position = firsts.pop()
                rank = ranks[0]
                index = next(i for _, g, p, i in pending[rank] if (g, p) == (name, position))
                return name, position, group.columns[rank].make_call(index)
    return None
