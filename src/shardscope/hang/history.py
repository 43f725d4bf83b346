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


class Step(Struct, frozen=True):
    """A call of a rank, as it repeats from step to step."""

    axis: str
    signature: int
    site: int
    group: str
    index: int


class Deviation(Struct, frozen=True):
    """The last call of a rank, and the call that followed the same calls earlier."""

    actual: DumpedCall
    expected: DumpedCall


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
    """The last call of a rank if something else followed the same calls in its last steps."""
    steps = list_steps(run, rank)
    if len(steps) < 2 * _CONTEXT:
        return None
    keys = [(step.axis, step.signature, step.site) for step in steps]
    context = keys[-1 - _CONTEXT : -1]
    expected: Step | None = None
    num_matches = 0
    for end in range(len(keys) - 2, _CONTEXT - 1, -1):
        if keys[end - _CONTEXT : end] == context:
            if keys[end] == keys[-1]:
                return None
            expected = expected or steps[end]
            num_matches += 1
    if expected is None:
        return None
    return Deviation(_make(run, rank, steps[-1]), _make(run, rank, expected))


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
