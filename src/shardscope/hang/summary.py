"""Turns what was found into records: progress of groups, waits, divergences, states, sources."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping

from shardscope.hang.activities import Activity
from shardscope.hang.dumped_calls import DumpedCall
from shardscope.hang.evidence import CallState, FileFormat, FileReport
from shardscope.hang.groups import RunGroup
from shardscope.hang.mismatch import Divergence, list_differences
from shardscope.hang.rank_calls import IssuedCall, Wait, payload_bytes
from shardscope.hang.run import HangRun
from shardscope.hang.waits import HangState
from shardscope.record.hang_records import (
    GroupProgress,
    HangCall,
    HangDivergence,
    HangSide,
    HangSource,
    HangWait,
    RankState,
)
from shardscope.record.ranks import compress_ranks

_MAX_GROUPS = 60  # with rows; others, whose ranks are level, are counted
_MAX_ROWS = 12  # of a group
_MAX_WAITS = 40
_MAX_STATES = 40
_NUMBERS = re.compile(r"\d+")


def make_call(call: IssuedCall) -> HangCall:
    """The record of a call."""
    state = call.state.name.lower() if isinstance(call, DumpedCall) else ""
    return HangCall(
        kind=call.kind,
        op=call.op,
        dtype=call.dtype,
        num_bytes=payload_bytes(call),
        reduce_op=call.reduce_op,
        peer=call.peer,
        is_located=not isinstance(call, DumpedCall) or call.is_located,
        module=call.owner,
        phase=call.phase,
        source=call.source,
        state="" if state == CallState.UNKNOWN.name.lower() else state,
    )


def list_progress(
    run: HangRun, state: HangState | None, diverged: Mapping[str, Divergence]
) -> tuple[tuple[GroupProgress, ...], int]:
    """Rows of how far the ranks of each group have come, and how many level groups have none."""
    busy_names = set(diverged)
    if state is not None:
        busy_names.update(wait.group for wait in state.waits)
    rows: list[GroupProgress] = []
    num_level = 0
    names = sorted(
        run.groups, key=lambda name: (name not in busy_names, _is_level(run.groups[name]))
    )
    for number, name in enumerate(names):
        group = run.groups[name]
        if not group.columns:
            continue
        if number >= _MAX_GROUPS or (
            name not in busy_names and _is_level(group) and len(run.groups) > _MAX_GROUPS // 4
        ):
            num_level += 1
            continue
        rows.extend(_list_rows(run, group))
    return tuple(rows), num_level


def _is_level(group: RunGroup) -> bool:
    issued = {calls.num_collectives for calls in group.calls.values() if calls.is_known}
    return len(issued) <= 1


def _list_rows(run: HangRun, group: RunGroup) -> Iterator[GroupProgress]:
    """Ranks of a group that have issued equally many, with the last call of the first of them."""
    is_level = _is_level(group)
    by_progress: defaultdict[tuple[int, int | None, str], list[int]] = defaultdict(list)
    for rank in group.calls:
        columns = group.columns.get(rank)
        issued = 0 if columns is None else columns.columns.num_issued
        done = None if columns is None else columns.columns.num_done
        activity = run.activities.get(rank)
        now = "" if activity is None or is_level else activity.detail
        by_progress[issued, done, now].append(rank)
    most = max((issued for issued, _, _ in by_progress), default=0)
    ordered = sorted(by_progress.items(), key=lambda item: (-item[0][0], item[1]))
    for (issued, done, now), ranks in ordered[:_MAX_ROWS]:
        columns = group.columns.get(ranks[0])
        last = None
        if columns is not None and len(columns.columns):
            last = make_call(columns.make_call(len(columns.columns) - 1))
        yield GroupProgress(
            group=group.name,
            group_size=group.size,
            ranks=compress_ranks(ranks),
            num_issued=issued,
            num_done=done,
            behind=most - issued,
            last=last,
            now=now,
        )


def list_waits(state: HangState | None) -> tuple[HangWait, ...]:
    """The waits, those with most waiting ranks first."""
    if state is None:
        return ()
    certain = {id(wait) for waits in state.certain.values() for wait in waits}
    waits = sorted(state.waits, key=lambda wait: -len(wait.waiters))[:_MAX_WAITS]
    return tuple(_make_wait(wait, is_certain=id(wait) in certain) for wait in waits)


def _make_wait(wait: Wait, *, is_certain: bool) -> HangWait:
    ranks = sorted(wait.waiters)
    return HangWait(
        group=wait.group,
        position=wait.position,
        waiters=compress_ranks(ranks),
        missing=compress_ranks(sorted(wait.missing)),
        call=make_call(wait.waiters[ranks[0]]),
        is_certain=is_certain,
    )


def list_divergences(
    run: HangRun, diverged: Mapping[str, Divergence]
) -> tuple[HangDivergence, ...]:
    """What each side issued where groups diverge."""
    return tuple(
        HangDivergence(
            group=name,
            position=divergence.position,
            differing=tuple(list_differences(divergence.sides)) or ("whether there is a call",),
            sides=tuple(
                HangSide(
                    ranks=compress_ranks(divergence.sides[facets]),
                    call=_find_call(run, name, divergence, facets),
                )
                for facets in reversed(divergence.order_sides())
            ),
        )
        for name, divergence in list(diverged.items())[:_MAX_WAITS]
    )


def _find_call(
    run: HangRun, name: str, divergence: Divergence, facets: tuple[tuple[str, object], ...]
) -> HangCall | None:
    rank = divergence.sides[facets][0]
    call = run.groups[name].calls[rank].collectives.get(divergence.position)
    return None if call is None or not facets else make_call(call)


def list_states(run: HangRun) -> tuple[RankState, ...]:
    """What ranks do by their stacks, and what logs say happened to them; equal ones together."""
    by_state: defaultdict[tuple[str, str, Activity | None], list[int]] = defaultdict(list)
    for rank, files in run.ranks.items():
        activity = run.activities.get(rank)
        failure = run.failures.get(rank)
        event = failure or next(iter(files.events), None)
        if activity is None and event is None:
            continue
        detail = "" if event is None else event.text
        by_state[activity.detail if activity else "", detail, activity].append(rank)
    ordered = sorted(by_state.items(), key=lambda item: (len(item[1]), item[1]))[:_MAX_STATES]
    return tuple(
        RankState(
            ranks=compress_ranks(ranks),
            activity=what,
            detail=detail,
            frames=() if activity is None else activity.frames,
        )
        for (what, detail, activity), ranks in ordered
    )


def list_sources(run: HangRun) -> tuple[HangSource, ...]:
    """The files that were read, by format and pattern of their names."""
    ranks: defaultdict[str, set[int]] = defaultdict(set)
    for rank, rank_files in run.ranks.items():
        for evidence in rank_files.evidence:
            ranks[evidence.path].add(rank)
    by_pattern: defaultdict[tuple[str, FileFormat, str], list[FileReport]] = defaultdict(list)
    for file_report in run.reports:
        if file_report.format is not None:
            pattern = _NUMBERS.sub("*", file_report.path)
            by_pattern[pattern, file_report.format, file_report.detail].append(file_report)
    return tuple(
        HangSource(
            pattern=files[0].path if len(files) == 1 else pattern,
            format=str(file_format),
            num_files=len(files),
            ranks=compress_ranks(sorted(set().union(*(ranks[file.path] for file in files)))),
            num_calls=_count_calls(files),
            detail=detail,
        )
        for (pattern, file_format, detail), files in by_pattern.items()
    )


def _count_calls(files: Iterable[FileReport]) -> int | None:
    counts = [
        len(columns)
        for file_report in files
        for evidence in file_report.ranks
        for columns in evidence.columns
    ]
    return sum(counts) if counts else None
