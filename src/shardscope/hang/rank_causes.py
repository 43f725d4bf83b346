"""Causes in a single rank: it failed, does not answer, or left nothing."""

from __future__ import annotations

from collections.abc import Iterator

from shardscope.hang.activities import list_program_lines
from shardscope.hang.cause_text import (
    describe_event,
    describe_rank,
    describe_waiters,
    find_source,
    make_cause,
)
from shardscope.hang.evidence import EventKind, RankEvent
from shardscope.hang.first_wait import find_wait
from shardscope.hang.rank_calls import name_ranks
from shardscope.hang.run import HangRun
from shardscope.hang.waits import HangState
from shardscope.record.base import name_line
from shardscope.record.hang_records import CauseKind, Certainty, HangCause

_NAMED = (CauseKind.DATA_LOADING, CauseKind.COMPILING, CauseKind.FILE_SYSTEM)
_LOST = (EventKind.DEAD, EventKind.UNREACHABLE)


def explain_failures(run: HangRun, state: HangState | None) -> Iterator[HangCause]:
    """Ranks that raised, were killed or ran out of memory."""
    by_event: dict[tuple[EventKind, str], list[int]] = {}
    for rank, event in run.failures.items():
        by_event.setdefault((event.kind, event.text), []).append(rank)
    waited_for = set(state.ranks) if state is not None else set()
    roots = [rank for rank, event in run.failures.items() if event.is_root]
    for (kind, _), ranks in by_event.items():
        event = run.failures[ranks[0]]
        is_waited = not waited_for.isdisjoint(ranks)
        is_only = len(by_event) == 1
        is_root = not roots or not set(roots).isdisjoint(ranks)
        is_memory = kind is EventKind.OUT_OF_MEMORY
        wait = find_wait(run, state, ranks)
        yield make_cause(
            CauseKind.OUT_OF_MEMORY if is_memory else CauseKind.CRASH,
            Certainty.CERTAIN if is_waited or (is_only and is_root) else Certainty.LIKELY,
            ranks,
            [f"{name_ranks(ranks)} {describe_event(event)}", describe_waiters(wait)],
            evidence=[describe_rank(run, rank) for rank in ranks[:1]],
            wait=wait,
            source=find_source(run, ranks[0]),
        )


def explain_unreachable(run: HangRun, state: HangState | None) -> Iterator[HangCause]:
    """Ranks that do not answer NCCL's RAS, the debug server or a monitored barrier."""
    silent: dict[EventKind, dict[int, RankEvent]] = {kind: {} for kind in _LOST}
    for rank, files in run.ranks.items():
        for event in files.events:
            if event.kind in silent and rank not in run.failures:
                silent[event.kind][rank] = event
    dead = silent[EventKind.DEAD]
    unreachable = {
        rank: event for rank, event in silent[EventKind.UNREACHABLE].items() if rank not in dead
    }
    for kind, events in ((CauseKind.LOST, dead), (CauseKind.STOPPED, unreachable)):
        ranks = sorted(events)
        if not ranks or len(ranks) == len(run.ranks):
            continue
        wait = find_wait(run, state, ranks)
        runs = [rank for rank in ranks if run.ranks[rank].stacks]
        evidence = [describe_rank(run, rank) for rank in ranks[:2]]
        if runs:
            evidence.append(f"the stack of {name_ranks(runs)} shows that the process exists")
        yield make_cause(
            kind,
            Certainty.LIKELY,
            ranks,
            [f"{name_ranks(ranks)} {events[ranks[0]].text}", describe_waiters(wait)],
            evidence=evidence,
            wait=wait,
            source=find_source(run, ranks[0]),
        )


def explain_stacks(run: HangRun) -> Iterator[HangCause]:
    """Of stacks alone: ranks that do something else while the others are in a collective."""
    waiting = [rank for rank, activity in run.activities.items() if activity.is_waiting]
    others = [rank for rank in run.activities if rank not in waiting]
    named = [rank for rank in others if run.activities[rank].kind in _NAMED] or others
    if not waiting or not named or len(named) > len(waiting):
        return
    kind = run.activities[named[0]].kind or CauseKind.SLOW
    ranks = [rank for rank in named if (run.activities[rank].kind or CauseKind.SLOW) is kind]
    lines = [name_line(run.activities[rank].line) for rank in waiting[:1]]
    place = f" at {lines[0]}" if lines[0] else ""
    yield make_cause(
        kind,
        Certainty.LIKELY,
        ranks,
        [
            f"the stacks show {name_ranks(waiting)} {run.activities[waiting[0]].detail}{place}, "
            f"and {name_ranks(ranks)} {run.activities[ranks[0]].detail}"
        ],
        evidence=[describe_rank(run, rank) for rank in ranks[:2]],
        source=run.activities[ranks[0]].line,
        where="there",
    )


def explain_timeouts(run: HangRun) -> Iterator[HangCause]:
    """Of logs alone: the ranks that did not time out, where the others did."""
    kinds = {rank: {event.kind for event in files.events} for rank, files in run.ranks.items()}
    waited = [rank for rank, found in kinds.items() if EventKind.TIMEOUT in found]
    others = [rank for rank in run.ranks if rank not in waited and rank not in run.failures]
    missing = run.missing_ranks if run.is_world_size_known else []
    quiet = sorted({*others, *missing})
    if not waited or not quiet or 2 * len(quiet) > len(waited) + len(quiet):
        return
    lines = [
        name_line(lines[0])
        for event in run.ranks[waited[0]].events
        if event.kind is EventKind.TIMEOUT and (lines := list_program_lines(event.frames))
    ]
    place = f" at {lines[0]}" if lines else ""
    yield make_cause(
        CauseKind.SLOW,
        Certainty.POSSIBLE,
        quiet,
        [
            f"{name_ranks(waited)} timed out in a collective{place}; {name_ranks(quiet)} did not, "
            "so it is likely that the others waited for " + ("it" if len(quiet) == 1 else "them")
        ],
        evidence=[describe_rank(run, rank) for rank in quiet[:2]],
        where="at that time",
    )
