"""Whether a rank that others wait for went past their collective instead of being on its way."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from shardscope.hang.divergence_causes import find_shift
from shardscope.hang.history import Deviation, Step, find_deviation, list_steps
from shardscope.hang.rank_calls import GroupCalls, Wait, describe_call, line_of
from shardscope.hang.run import HangRun

_MAX_WAITERS = 4  # that a rank is compared with
_MAX_SCANNED = 4_000  # positions before the wait
_MAX_COMPARED = 16  # positions before the wait in which two ranks must do the same


def find_skipped(run: HangRun, rank: int, wait: Wait) -> str | None:
    """What shows that a rank skipped a collective of a group; None if nothing does."""
    if wait.position is None:
        return None
    group = run.groups[wait.group].calls
    return (
        _find_shifted_lines(group, rank, wait)
        or _find_ahead(run, rank, wait)
        or _find_change(run, rank, wait)
    )


def _find_shifted_lines(group: GroupCalls, rank: int, wait: Wait) -> str | None:
    """The first position whose line differs from the others', where a call was left out."""
    waiters = [group[waiter] for waiter in sorted(wait.waiters)[:_MAX_WAITERS]]
    mine = group.get(rank)
    if mine is None:
        return None
    assert wait.position is not None
    for position in range(max(0, wait.position - _MAX_SCANNED), wait.position):
        call = mine.collectives.get(position)
        lines = {
            line_of(calls.collectives[position])
            for calls in waiters
            if position in calls.collectives
        }
        if call is None or len(lines) != 1:
            continue
        line = lines.pop()
        if line and line_of(call) not in ("", line):
            if find_shift(mine, waiters[0], position) <= 0:
                return None
            return (
                f"from position {position} on its lines are those that follow on the others: it "
                f"left out the call at {line}"
            )
    return None


def _find_ahead(run: HangRun, rank: int, wait: Wait) -> str | None:
    """Calls in other groups that the waiting ranks have not reached at that place of a step."""
    assert wait.position is not None
    own = _list_after(run, rank, wait.group, wait.position - 1)
    if own is None:
        return None
    for waiter in sorted(wait.waiters)[:_MAX_WAITERS]:
        theirs = _list_after(run, waiter, wait.group, wait.position - 1, until=wait.position)
        if theirs is None or not _have_same_role(run, rank, waiter, wait):
            continue
        excess = Counter(_name(step) for step in own) - Counter(_name(step) for step in theirs)
        ahead = next((step for step in own if excess.get(_name(step))), None)
        if ahead is not None:
            call = run.groups[ahead.group].columns[rank].make_call(ahead.index)
            return (
                f"it has already issued {describe_call(call)} in group {ahead.group}, which the "
                "waiting ranks have not reached"
            )
    return None


def _name(step: Step) -> str:
    return step.axis


def _list_after(
    run: HangRun, rank: int, group: str, position: int, *, until: int | None = None
) -> list[Step] | None:
    """The calls of a rank after one of its collectives in a group, up to another of them.

    None if the first is not in its dump; all calls for position -1, if none was overwritten.
    """
    columns = run.groups[group].columns.get(rank)
    if columns is None:
        return None
    start = end = None
    for index, own_position in enumerate(columns.positions):
        if own_position == position:
            start = columns.orders[index]
        if own_position == until:
            end = columns.orders[index]
    if start is None and (position >= 0 or _is_wrapped(run, rank)):
        return None
    return [
        step
        for step in list_steps(run, rank)
        if (start is None or _order(run, rank, step) > start)
        and (end is None or _order(run, rank, step) < end)
    ]


def _is_wrapped(run: HangRun, rank: int) -> bool:
    return any(piece.is_wrapped for piece in run.ranks[rank].with_calls)


def _order(run: HangRun, rank: int, step: Step) -> int:
    return run.groups[step.group].columns[rank].orders[step.index]


def _have_same_role(run: HangRun, rank: int, waiter: int, wait: Wait) -> bool:
    """Whether both ranks issued equally many in each group's role in the steps before the wait."""
    assert wait.position is not None
    last = wait.position - 1
    for first in range(max(-1, last - _MAX_COMPARED), last):
        before = [_list_after(run, own, wait.group, first, until=last) for own in (rank, waiter)]
        if before[0] is not None and before[1] is not None:
            return Counter(map(_name, before[0])) == Counter(map(_name, before[1]))
    return False


def _find_change(run: HangRun, rank: int, wait: Wait) -> str | None:
    """A call of the rank that did not follow the same calls before."""
    deviation = find_deviation(run, rank)
    if deviation is None or deviation.expected.group != wait.group:
        return None
    return describe_deviation(deviation)


def list_deviating(run: HangRun, ranks: list[int]) -> Iterator[tuple[int, Deviation]]:
    """Ranks that did something else than in their earlier steps."""
    for rank in ranks:
        deviation = find_deviation(run, rank)
        if deviation is not None:
            yield rank, deviation


def describe_deviation(deviation: Deviation) -> str:
    """What a rank issued, and what it issued there in earlier steps."""
    actual, expected = deviation.actual, deviation.expected
    return (
        f"rank {actual.rank} issued {describe_call(actual)} in group {actual.group}, where "
        f"{describe_call(expected)} in group {expected.group} followed in earlier steps"
    )
