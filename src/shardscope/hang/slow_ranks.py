"""Which rank is slow in a run that did not hang: waiting for others is separated from transferring.

No rank leaves a collective before the last has arrived. So the time from the last arrival to the
end is that of the transfer, and the time before it, that of waiting. Arrivals on one host are
compared directly. Clocks of different hosts are aligned by the collectives themselves; where only
durations are known, as on a GPU, the rank whose collective took shortest arrived last.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from statistics import median
from typing import final

from msgspec import Struct

from shardscope.hang.combine import RankFiles
from shardscope.hang.dumped_calls import RankColumns
from shardscope.hang.evidence import view_integers
from shardscope.hang.groups import RunGroup
from shardscope.hang.run import HangRun
from shardscope.record.hang_records import GroupSkew, SlowRank
from shardscope.record.ranks import MAX_RANKS

_MIN_CALLS = 8  # of a group, that all its ranks have times of
_MIN_SKEW_SHARE = 0.05  # of the time of a run, that is spent waiting for a slow rank
_MAX_SHOWN = 8
_MAX_CALLS = 500_000  # of all ranks, that are compared: the last ones of each group


class Arrivals(Struct, frozen=True):
    """A collective of a group: when each rank arrived, and when it left, 0 where not known.

    Times are of the rank's own clock, or, if `has_clock` is false, negative durations.
    """

    position: int
    arrived: Mapping[int, int]
    left: Mapping[int, int]
    has_clock: bool = True


class _Excess(Struct):
    """What a rank cost the others."""

    num_last: int = 0
    num_delayed: int = 0
    num_collectives: int = 0
    excess_ns: int = 0
    by_group: dict[str, int] = {}


def find_skew(run: HangRun) -> tuple[tuple[GroupSkew, ...], tuple[SlowRank, ...]]:
    """How long groups waited for their last rank, and the ranks that others waited for most."""
    num_columns = sum(len(group.columns) for group in run.groups.values())
    most = max(_MIN_CALLS, _MAX_CALLS // max(1, num_columns))
    arrivals = {name: list(_list_arrivals(group, most)) for name, group in run.groups.items()}
    if max(map(len, arrivals.values()), default=0) < _MIN_CALLS:
        return (), ()
    arrivals = {name: found for name, found in arrivals.items() if found}
    offsets = _align_clocks(run, arrivals)
    aligned: dict[str, list[Arrivals]] = {}
    for name, found in arrivals.items():
        shifted = [moved for arrival in found if (moved := _shift(arrival, offsets)) is not None]
        if shifted:
            aligned[name] = shifted
    skews = tuple(
        skew for name, found in aligned.items() if (skew := _sum_skew(name, found)) is not None
    )
    slow = _find_slow(run, aligned)
    ordered = sorted(skews, key=lambda skew: -skew.skew_ns * skew.num_collectives)
    return tuple(ordered[:_MAX_SHOWN]), slow


def _list_arrivals(group: RunGroup, most: int) -> Iterator[Arrivals]:
    """The last collectives that all ranks with files have times of."""
    ranks = {
        rank: _TimedCalls(columns)
        for rank, columns in group.columns.items()
        if len(columns.columns)
    }
    if len(ranks) < 2:
        return
    first = max(calls.first for calls in ranks.values())
    last = min(calls.last for calls in ranks.values())
    has_durations = all(calls.has_durations for calls in ranks.values())
    for position in range(max(first, last - most), last + 1):
        indices = {rank: calls.find(position) for rank, calls in ranks.items()}
        if any(index is None for index in indices.values()):
            continue
        arrived: dict[int, int] = {}
        left: dict[int, int] = {}
        for rank, index in indices.items():
            assert index is not None
            calls = ranks[rank]
            duration = calls.durations[index]
            if has_durations:
                arrived[rank], left[rank] = -duration, 0
            else:
                arrived[rank], left[rank] = calls.created[index], 0
        has_all = all(arrived.values())
        if has_all:
            yield Arrivals(position, arrived, left, has_clock=not has_durations)


@final
class _TimedCalls:
    """The times of a rank's calls in a group, by position."""

    def __init__(self, columns: RankColumns) -> None:
        self._indices = {
            position: index for index, position in enumerate(columns.positions) if position >= 0
        }
        self.first = min(self._indices, default=0)
        self.last = max(self._indices, default=-1)
        self.created = view_integers(columns.columns.created_ns)
        self.durations = view_integers(columns.columns.duration_ns)
        known = [self.durations[index] for index in self._indices.values()]
        self.has_durations = bool(known) and 2 * sum(map(bool, known)) > len(known)

    def find(self, position: int) -> int | None:
        index = self._indices.get(position)
        if index is not None and self.has_durations and not self.durations[index]:
            return None
        return index


def _align_clocks(run: HangRun, arrivals: Mapping[str, list[Arrivals]]) -> dict[int, int]:
    """What to add to each rank's times so that those of all hosts are comparable, where known.

    After a collective that blocks, a rank's next arrival is later than all arrivals at the first.
    These bounds hold in both directions, so they enclose the offset between two clocks; its middle
    is taken, unless 0 fits.
    """
    hosts = {rank: _name_clock(files) for rank, files in run.ranks.items()}
    if len(set(hosts.values())) <= 1:
        return dict.fromkeys(hosts, 0)
    by_host: dict[str, int] = {}
    reference: str | None = None
    for name, found in sorted(arrivals.items(), key=lambda item: -len(item[1][0].arrived)):
        if not found[0].has_clock or run.groups[name].backend not in ("gloo", "mpi", ""):
            continue
        ranks = sorted(found[0].arrived)
        if reference is None:
            reference = hosts[ranks[0]]
            by_host[reference] = 0
        for rank in ranks:
            base = next((own for own in ranks if hosts[own] in by_host), None)
            if base is None or hosts[rank] in by_host:
                continue
            is_dated = hosts[rank].startswith("host") and hosts[base].startswith("host")
            offset = _bound_offset(found, base, rank, is_dated=is_dated)
            if offset is not None:
                by_host[hosts[rank]] = by_host[hosts[base]] + offset
    return {rank: by_host[host] for rank, host in hosts.items() if host in by_host}


def _name_clock(files: RankFiles) -> str:
    """Which clock a rank's times are of: that of its host, or its own if they have no date."""
    calls = files.with_calls[0] if files.with_calls else None
    has_date = calls is not None and bool(calls.first_ns)
    return f"host {files.host}" if has_date else f"rank {files.rank}"


def _bound_offset(found: list[Arrivals], base: int, rank: int, *, is_dated: bool) -> int | None:
    """What to add to a rank's times to compare them with another's, from the order of arrivals.

    None if the arrivals contradict each other.
    """
    low, high = -(2**62), 2**62
    for before, after in pairwise(found):
        if after.position == before.position + 1:
            low = max(low, before.arrived[base] - after.arrived[rank])
            high = min(high, after.arrived[base] - before.arrived[rank])
    if low > high or (low, high) == (-(2**62), 2**62):
        return 0 if is_dated else None
    if is_dated and low <= 0 <= high:
        return 0
    return (low + high) // 2


def _shift(arrival: Arrivals, offsets: Mapping[int, int]) -> Arrivals | None:
    """The arrivals on one clock; None if the clocks of some ranks cannot be compared."""
    if not arrival.has_clock:
        return arrival
    if not offsets.keys() >= arrival.arrived.keys():
        return None
    return Arrivals(
        arrival.position,
        {rank: time + offsets[rank] for rank, time in arrival.arrived.items()},
        arrival.left,
    )


def _sum_skew(name: str, found: list[Arrivals]) -> GroupSkew | None:
    """The mean wait and transfer of a group's collectives."""
    waits: list[float] = []
    transfers: list[int] = []
    num_last: defaultdict[int, int] = defaultdict(int)
    for arrival in found:
        last = max(arrival.arrived.values())
        waits.append(sum(last - time for time in arrival.arrived.values()) / len(arrival.arrived))
        num_last[max(arrival.arrived, key=lambda rank: arrival.arrived[rank])] += 1
        if not arrival.has_clock:
            transfers.append(-last)
    rank = max(num_last, key=lambda rank: num_last[rank])
    return GroupSkew(
        group=name,
        num_collectives=len(found),
        skew_ns=round(sum(waits) / len(waits)),
        transfer_ns=round(sum(transfers) / len(transfers)) if transfers else None,
        last_rank=min(rank, MAX_RANKS - 1),
        num_last=num_last[rank],
    )


def _find_slow(run: HangRun, arrivals: Mapping[str, list[Arrivals]]) -> tuple[SlowRank, ...]:
    """Ranks that the others waited for, as far as the delay arose on them.

    A rank that is late because it waited in another group is not slow: of the time by which it came
    last, as much counts as it took longer than the others since its last collective.
    """
    costs: defaultdict[int, _Excess] = defaultdict(_Excess)
    duration_ns = 0
    leaves = _list_leaves(arrivals.values())
    for name, found in arrivals.items():
        duration_ns = max(duration_ns, _measure(found))
        for arrival in found:
            last = max(arrival.arrived, key=lambda rank: arrival.arrived[rank])
            times = sorted(arrival.arrived.values())
            delay_ns = min(times[-1] - times[-2], _find_excess(arrival, last, leaves))
            cost = costs[last]
            cost.num_last += 1
            if delay_ns > 0:
                cost.excess_ns += delay_ns
                cost.num_delayed += 1
                cost.by_group[name] = cost.by_group.get(name, 0) + delay_ns
        for rank in found[0].arrived:
            costs[rank].num_collectives += len(found)
    slow = [
        _make_slow(run, rank, cost)
        for rank, cost in costs.items()
        if cost.excess_ns > _MIN_SKEW_SHARE * duration_ns
    ]
    return tuple(sorted(slow, key=lambda rank: -rank.excess_ns)[:_MAX_SHOWN])


def _make_slow(run: HangRun, rank: int, cost: _Excess) -> SlowRank:
    last_call = run.last.get(rank)
    return SlowRank(
        rank=rank,
        num_collectives=cost.num_collectives,
        num_last=cost.num_delayed,
        excess_ns=cost.excess_ns,
        mean_late_ns=cost.excess_ns // max(1, cost.num_delayed),
        group=max(cost.by_group, key=lambda name: cost.by_group[name]),
        source=None if last_call is None else last_call.source,
    )


def _find_excess(arrival: Arrivals, last: int, leaves: Mapping[tuple[int, int], int]) -> int:
    """By how much longer than the median rank the last took since its collective before."""
    if not arrival.has_clock:
        return 2**62  # a duration on the GPU does not tell where a delay arose
    own = {
        rank: time - leaves[rank, time]
        for rank, time in arrival.arrived.items()
        if (rank, time) in leaves
    }
    others = [took for rank, took in own.items() if rank != last]
    return own[last] - round(median(others)) if last in own and others else 0


def _measure(found: list[Arrivals]) -> int:
    """The time that a group's collectives span; the sum of their durations, without clocks."""
    if not found[0].has_clock:
        return sum(-min(arrival.arrived.values()) for arrival in found)
    return max(found[-1].arrived.values()) - min(found[0].arrived.values())


def _list_leaves(groups: Iterable[list[Arrivals]]) -> dict[tuple[int, int], int]:
    """For each arrival of a rank, when it left the collective before, at its last arrival."""
    events: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
    for found in groups:
        for arrival in found:
            if arrival.has_clock:
                last = max(arrival.arrived.values())
                for rank, time in arrival.arrived.items():
                    events[rank].append((time, last))
    leaves: dict[tuple[int, int], int] = {}
    for rank, own in events.items():
        own.sort()
        for (_, left), (time, _) in pairwise(own):
            leaves[rank, time] = min(left, time)
    return leaves
