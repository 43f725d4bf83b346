"""What is known of a run: its ranks with their files, and its groups with their calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import Struct

from shardscope.hang.activities import Activity, read_activity
from shardscope.hang.combine import RankFiles, combine_ranks
from shardscope.hang.evidence import (
    EventKind,
    FileFormat,
    FileReport,
    RankEvent,
    RankEvidence,
)
from shardscope.hang.evidence.failures import CONSEQUENCES
from shardscope.hang.groups import RunGroup, find_last_calls, join_groups
from shardscope.hang.identify import identify_ranks
from shardscope.hang.pending_calls import find_stuck_calls, list_pending
from shardscope.hang.rank_calls import GroupCalls, IssuedCall
from shardscope.hang.waits import BLOCKING_BACKENDS, RunState
from shardscope.record.hang_records import CauseKind
from shardscope.record.ranks import compress_ranks
from shardscope.record.recording import Gap, Stop

_OWN_FAILURES = (
    EventKind.OUT_OF_MEMORY,
    EventKind.EXCEPTION,
    EventKind.GPU,
    EventKind.SIGNAL,
    EventKind.EXIT,
)
_ELSEWHERE = (CauseKind.DATA_LOADING, CauseKind.COMPILING, CauseKind.FILE_SYSTEM)
_ABORTED = ("SIGABRT",)


class HangRun(Struct):
    """A run as its files show it. `job_events` are events that no rank is known for.

    `failures` are the ranks that failed by themselves, each with the event that says so;
    `activities` what ranks do by their stacks.
    """

    ranks: dict[int, RankFiles]
    groups: dict[str, RunGroup]
    world_size: int | None
    is_world_size_known: bool
    last: Mapping[int, IssuedCall]
    last_on_thread: Mapping[tuple[int, str], IssuedCall]
    activities: dict[int, Activity]
    failures: dict[int, RankEvent]
    job_events: list[RankEvent]
    gaps: list[Gap]
    notes: list[str]
    reports: Sequence[FileReport]

    @property
    def missing_ranks(self) -> list[int]:
        """Ranks of the world that left no file."""
        return sorted(set(range(self.world_size or 0)) - set(self.ranks))

    @property
    def calls(self) -> dict[str, GroupCalls]:
        """The calls of the groups that are compared."""
        return {name: group.calls for name, group in self.groups.items()}


def read_run(reports: Sequence[FileReport]) -> HangRun:
    """Join the reports of all files."""
    by_rank, unknown, gaps = identify_ranks(reports)
    modified_ns = {file_report.path: file_report.modified_ns for file_report in reports}
    ranks, more_gaps, notes = combine_ranks(by_rank, modified_ns)
    world_size, is_known = _find_world_size(ranks, unknown)
    groups = _choose_groups(join_groups(ranks, world_size), ranks)
    if not is_known:
        members = [rank for group in groups.values() for rank in group.members]
        at_least = max([world_size or 0, *(rank + 1 for rank in members)]) or None
        if at_least != world_size:
            world_size = at_least
            groups = _choose_groups(join_groups(ranks, world_size), ranks)
    last, on_thread = find_last_calls(groups)
    activities = {
        rank: read_activity(stack)
        for rank, files in ranks.items()
        if (stack := files.main_stack) is not None
    }
    file_gaps = [gap for file_report in reports for gap in file_report.gaps]
    return HangRun(
        ranks=ranks,
        groups=groups,
        world_size=world_size,
        is_world_size_known=is_known,
        last=last,
        last_on_thread=on_thread,
        activities=activities,
        failures=_find_failures(ranks),
        job_events=[event for piece in unknown for event in piece.events],
        gaps=[*file_gaps, *gaps, *more_gaps],
        notes=notes,
        reports=reports,
    )


def _find_world_size(
    ranks: Mapping[int, RankFiles], unknown: Sequence[RankEvidence]
) -> tuple[int | None, bool]:
    """The number of ranks, and whether a file says it; else the highest rank is the last."""
    pieces = [piece for files in ranks.values() for piece in files.evidence]
    sizes = [piece.world_size for piece in (*pieces, *unknown) if piece.world_size]
    sizes += [
        len(fact.ranks)
        for piece in pieces
        for fact in piece.groups
        if fact.ranks and fact.description == "default_pg"
    ]
    highest = max(ranks, default=-1) + 1
    if sizes and max(sizes) >= highest:
        return max(sizes), True
    return (highest or None), False


def _choose_groups(
    groups: dict[str, RunGroup], ranks: Mapping[int, RankFiles]
) -> dict[str, RunGroup]:
    """Leave out NCCL's communicators where torch's groups, of which they are, are known too."""
    by_torch = {
        rank
        for group in groups.values()
        if group.key[0] == "torch" and group.format is not FileFormat.LOG
        for rank in group.columns
    }
    by_nccl = {
        rank for group in groups.values() if group.key[0] == "nccl" for rank in group.columns
    }
    if len(by_torch) >= len(by_nccl):
        return {name: group for name, group in groups.items() if group.key[0] == "torch"}
    return {
        name: group
        for name, group in groups.items()
        if group.key[0] == "nccl" or group.format is FileFormat.LOG
    }


def _find_failures(ranks: Mapping[int, RankFiles]) -> dict[int, RankEvent]:
    """Ranks that failed by themselves; the others waited for them, or were ended from outside."""
    has_timeout = any(
        event.kind is EventKind.TIMEOUT for files in ranks.values() for event in files.events
    )
    failures: dict[int, RankEvent] = {}
    for rank, files in ranks.items():
        kinds = {event.kind for event in files.events}
        is_consequence = not kinds.isdisjoint(CONSEQUENCES)
        for event in sorted(files.events, key=_rank_event):
            if event.kind not in _OWN_FAILURES or _is_end(event):
                continue
            if event.kind is EventKind.EXIT and (is_consequence or len(kinds) > 1):
                continue
            is_abort = any(name in event.text for name in _ABORTED)
            if is_abort and (has_timeout or is_consequence):
                continue  # NCCL's watchdog ends its process so
            failures[rank] = event
            break
    return _drop_common(failures, ranks)


def _rank_event(event: RankEvent) -> tuple[int, int]:
    return _OWN_FAILURES.index(event.kind) if event.kind in _OWN_FAILURES else 99, event.line


def _is_end(event: RankEvent) -> bool:
    return event.kind is EventKind.EXIT and event.text == "exited with code 0"


def _drop_common(
    failures: dict[int, RankEvent], ranks: Mapping[int, RankFiles]
) -> dict[int, RankEvent]:
    """Leave out signals that most ranks got: a user or scheduler ends a run so that hangs."""
    signalled = [rank for rank, event in failures.items() if event.kind is EventKind.SIGNAL]
    if len(signalled) <= 1 or 2 * len(signalled) < len(ranks):
        return failures
    return {rank: event for rank, event in failures.items() if event.kind is not EventKind.SIGNAL}


def make_run_state(run: HangRun) -> RunState:
    """What the search for waits reads besides the calls."""
    stops: dict[int, Stop] = {}
    blocking = frozenset(
        name for name, group in run.groups.items() if group.backend in BLOCKING_BACKENDS
    )
    seen_ns: dict[tuple[int, str], int] = {}
    for rank, files in run.ranks.items():
        if not files.with_calls and not files.events:
            continue
        if files.stop is not None:
            stops[rank] = files.stop
        elif not any(piece.is_finished for piece in files.with_calls):
            stops[rank] = Stop(rank=rank)
        for piece in files.with_calls:
            for thread, time_ns in piece.seen_ns:
                seen_ns[rank, thread] = max(seen_ns.get((rank, thread), 0), time_ns)
    return RunState(
        stops=stops,
        last=run.last,
        last_on_thread=run.last_on_thread,
        members={name: compress_ranks(group.members) for name, group in run.groups.items()},
        blocking=blocking,
        seen_ns=seen_ns,
        busy=frozenset(_find_busy(run, blocking)),
        stuck=frozenset(
            rank
            for group, _ in find_stuck_calls(run.groups, list_pending(run.groups))
            for rank in group.members
        ),
    )


def _find_busy(run: HangRun, blocking: frozenset[str]) -> set[int]:
    """Ranks whose stack or log shows that they are not in a wait."""
    busy = set(run.failures)
    for rank, activity in run.activities.items():
        last = run.last.get(rank)
        is_blocking = last is not None and last.group in blocking
        if activity.kind in _ELSEWHERE or (activity.kind is CauseKind.SLOW and is_blocking):
            busy.add(rank)
    return busy
