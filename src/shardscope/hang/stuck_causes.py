"""Causes where all ranks have issued the same: an order between groups, a GPU, or the network."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping

from shardscope.hang.cause_text import describe_rank, find_source, make_cause
from shardscope.hang.evidence import CallState, EventKind
from shardscope.hang.pending_calls import PendingCall, find_stuck_calls, list_pending
from shardscope.hang.rank_calls import (
    IssuedCall,
    Wait,
    Waiting,
    describe_call,
    find_cycle,
    name_ranks,
)
from shardscope.hang.run import HangRun
from shardscope.hang.skipped_calls import describe_deviation, list_deviating
from shardscope.record.hang_records import CauseKind, Certainty, HangCause
from shardscope.record.text import excerpt


def explain_stuck(run: HangRun) -> Iterator[HangCause]:
    """What does not complete although no rank is missing; nothing if all calls are done."""
    pending = list_pending(run.groups)
    yield from _explain_order(run, pending)
    yield from _explain_unstarted(run, pending)
    yield from _explain_network(run, pending)


def _explain_order(run: HangRun, pending: Mapping[int, list[PendingCall]]) -> Iterator[HangCause]:
    """Ranks whose oldest pending calls are of different groups, so that each waits for another."""
    heads = {rank: calls[0] for rank, calls in pending.items()}
    queued = {
        rank: {(call.group, call.position) for call in calls} for rank, calls in pending.items()
    }
    waiting: Waiting = {}
    for rank, head in heads.items():
        group = run.groups[head.group]
        place = head.group, head.position
        behind = tuple(
            member
            for member in group.members
            if member in heads
            and (heads[member].group, heads[member].position) != place
            and place in queued[member]
        )
        if behind:
            call: IssuedCall = group.columns[rank].make_call(head.index)
            waiting[rank] = [Wait(head.group, head.position, {rank: call}, behind)]
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
    yield make_cause(
        CauseKind.WRONG_ORDER,
        Certainty.LIKELY,
        ranks,
        ["all ranks have issued the same collectives, in different orders of their groups", *facts],
        evidence=[describe_deviation(item) for item in deviating.values()],
        wait=waiting[cycle[0]][0],
        source=find_source(run, cycle[0]),
    )


def _explain_unstarted(
    run: HangRun, pending: Mapping[int, list[PendingCall]]
) -> Iterator[HangCause]:
    """Ranks whose GPU has not begun a collective that has begun on the others."""
    by_call: defaultdict[tuple[str, int], dict[int, PendingCall]] = defaultdict(dict)
    for rank, calls in pending.items():
        for call in calls:
            by_call[call.group, call.position].setdefault(rank, call)
    for (name, position), found in sorted(by_call.items(), key=lambda item: item[0][1]):
        started = [rank for rank, call in found.items() if call.state is CallState.STARTED]
        heads = [
            rank
            for rank, call in found.items()
            if call.state is CallState.ISSUED and pending[rank][0] == call
        ]
        if not started or not heads or len(heads) >= len(started):
            continue
        example = run.groups[name].columns[started[0]].make_call(found[started[0]].index)
        yield make_cause(
            CauseKind.SLOW,
            Certainty.LIKELY,
            heads,
            [
                f"all ranks have issued {describe_call(example)} at position {position} of group "
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


def _explain_network(run: HangRun, pending: Mapping[int, list[PendingCall]]) -> Iterator[HangCause]:
    """A collective that all ranks have issued and that completes on none of them."""
    events = [
        (rank, event)
        for rank, files in run.ranks.items()
        for event in files.events
        if event.kind is EventKind.NETWORK
    ]
    evidence = [f"rank {rank}: {excerpt(event.text)}" for rank, event in events[:4]]
    evidence += [event.text for event in run.job_events if event.kind is EventKind.NETWORK][:2]
    stuck = find_stuck_calls(run.groups, pending)
    if not stuck and evidence:
        ranks = sorted({rank for rank, _ in events})
        fact = f"NCCL reports errors of the network on {name_ranks(ranks)}"
        yield make_cause(CauseKind.NETWORK, Certainty.LIKELY, ranks, [fact], evidence=evidence)
    for group, position in sorted(stuck, key=lambda item: len(item[0].members))[:1]:
        heads = {rank: pending[rank][0] for rank in group.members}
        rank = group.members[0]
        call = group.columns[rank].make_call(heads[rank].index)
        has_failed = any(head.state is CallState.FAILED for head in heads.values())
        has_timed_out = any(
            event.kind is EventKind.TIMEOUT
            for member in group.members
            for event in run.ranks[member].events
        )
        is_known = bool(evidence) or has_failed or has_timed_out
        end = (
            ": what is wrong is below torch (a link, a GPU, a driver)"
            if is_known
            else ": it may have been under way when the files were written"
        )
        yield make_cause(
            CauseKind.NETWORK if is_known else CauseKind.UNKNOWN,
            Certainty.LIKELY if is_known else Certainty.POSSIBLE,
            group.members,
            [
                f"all ranks of group {group.name} have issued {describe_call(call)} at position "
                f"{position}, and it has completed on none{end}"
            ],
            evidence=evidence,
            group=group.name,
            position=position,
            source=call.source,
        )
