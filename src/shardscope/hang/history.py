"""Whether a rank did something else than in its earlier steps: a step repeats itself.

The calls of a rank in all its groups, in order, are one sequence. What followed the same calls
earlier is what is expected next.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import merge

from msgspec import Struct

from shardscope.hang.dumped_calls import DumpedCall, RankColumns
from shardscope.hang.run import HangRun

_CONTEXT = 4  # calls before the last by which an earlier step is recognized
_MAX_CALLS = 20_000
_MAX_LEFT_OUT = 500
_MAX_STEP = 300  # the last calls, in which a deviation is looked for


class Step(Struct, frozen=True):
    """A call of a rank, as it repeats from step to step."""

    axis: str
    signature: int
    site: int
    group: str
    index: int


StepKey = tuple[str, int, int]
"""What is equal for the same call of two steps: its axis, signature and site."""


class Deviation(Struct, frozen=True):
    """A call of a rank, and the call that followed the same calls earlier.

    `position` is that of the expected call among the collectives of its group. `is_left_out` says
    whether the rank went on without it: None if it may issue it after the actual call.
    """

    actual: DumpedCall
    expected: DumpedCall
    position: int
    is_left_out: bool | None


def list_steps(run: HangRun, rank: int) -> list[Step]:
    """The calls of a rank in all groups, in the order in which it issued them."""
    columns = [
        (group.axis, group.name, group.columns[rank])
        for group in run.groups.values()
        if rank in group.columns
    ]
    streams = [_list_calls(axis, name, column) for axis, name, column in columns]
    return [step for _, step in merge(*streams, key=lambda item: item[0])][-_MAX_CALLS:]


def _list_calls(axis: str, group: str, columns: RankColumns) -> Iterator[tuple[int, Step]]:
    for index, order in enumerate(columns.orders):
        site = columns.site_ids[index] if columns.sites else 0
        yield order, Step(axis, columns.signature_ids[index], site, group, index)


def find_deviation(run: HangRun, rank: int) -> Deviation | None:
    """Where a rank first did something else after calls that it had issued before.

    Only its last calls count, as many as a step may have.
    """
    steps = list_steps(run, rank)
    keys = [(step.axis, step.signature, step.site) for step in steps]
    followers: dict[tuple[object, ...], dict[object, int]] = {}
    first = max(_CONTEXT, len(keys) - _MAX_STEP)
    for index in range(_CONTEXT, len(keys)):
        context = tuple(keys[index - _CONTEXT : index])
        known = followers.setdefault(context, {})
        if known and keys[index] not in known and index >= first:
            return _make_deviation(run, rank, steps, keys, index, next(iter(known.values())))
        known[keys[index]] = index
    return None


def _make_deviation(
    run: HangRun, rank: int, steps: list[Step], keys: list[StepKey], index: int, expected: int
) -> Deviation:
    """The deviation at an index from what followed at an earlier one."""
    wanted = _make(run, rank, steps[expected])
    rest = keys[expected : min(index, expected + _MAX_LEFT_OUT)]
    num_left_out = rest.index(keys[index]) if keys[index] in rest else 0
    after = keys[index:]
    following = rest[num_left_out:]
    num_equal = min(len(after), len(following))
    goes_on = num_equal > 1 and after[:num_equal] == following[:num_equal]
    is_left_out: bool | None = None
    if keys[expected] in after[:_CONTEXT]:
        is_left_out = False
    elif num_left_out > 1 or (num_left_out and goes_on):
        is_left_out = True
    columns = run.groups[steps[expected].group].columns[rank]
    order = run.groups[steps[index].group].columns[rank].orders[steps[index].index]
    position = 0
    for own_position, own_order in zip(columns.positions, columns.orders, strict=True):
        if own_order < order:
            position = max(position, own_position + 1)
    return Deviation(_make(run, rank, steps[index]), wanted, position, is_left_out)


def find_next(run: HangRun, rank: int) -> DumpedCall | None:
    """The call that followed the last calls of a rank earlier; None if none did."""
    steps = list_steps(run, rank)
    keys = [(step.axis, step.signature, step.site) for step in steps]
    context = keys[-_CONTEXT:]
    for end in range(len(keys) - 1, _CONTEXT - 1, -1):
        if keys[end - _CONTEXT : end] == context:
            return _make(run, rank, steps[end])
    return None


def _make(run: HangRun, rank: int, step: Step) -> DumpedCall:
    return run.groups[step.group].columns[rank].make_call(step.index)


def count_by_axis(run: HangRun, rank: int) -> dict[str, int]:
    """How many collectives a rank has issued in the groups of each role."""
    counts: dict[str, int] = {}
    for group in run.groups.values():
        if rank in group.columns:
            issued = group.columns[rank].columns.num_issued
            counts[group.axis] = counts.get(group.axis, 0) + issued
    return counts
