"""The profile of a log: its memory over the step, at the peak, and all its allocations."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeVar, final

from shardscope._torch.cuda.caching_allocator import Block, CachingAllocator
from shardscope.attribution.module_names import ModuleNames
from shardscope.record import (
    NO_POSITION,
    AllocationTable,
    MemoryKind,
    MemoryProfile,
    MemorySample,
    MemoryUse,
    Phase,
    SegmentTable,
    Source,
)
from shardscope.record.units import format_bytes, plural
from shardscope.shard.memory.allocations import Allocation, AllocationLog, PhaseAndModule

MAX_SAMPLES = 500
MAX_ROWS = 100_000
"""Rows of a table of allocations: about 4 MB of JSON, and a tenth of that compressed."""

_T = TypeVar("_T")
_PHASES = {phase: index for index, phase in enumerate(Phase)}
_KINDS = {kind: index for index, kind in enumerate(MemoryKind)}


class _MemoryAtEvent(NamedTuple):
    """The allocated bytes after an event."""

    order: int
    charged_to: PhaseAndModule
    total: int
    by_kind: tuple[int, ...]


def make_profile(
    allocation_log: AllocationLog, names: ModuleNames, *, rank: int, ends: Sequence[int]
) -> MemoryProfile:
    """The profile of the last step; `ends` are the numbers of events at the end of each step."""
    assign_kinds(allocation_log)
    replay = _Replay(allocation_log)
    begin = ends[-2] if len(ends) > 1 else 0
    before, step = list(replay.run(0, begin)), list(replay.run(begin, ends[-1]))
    first = before if len(ends) > 1 else step
    peak = max(step, key=lambda moment: moment.total)
    return MemoryProfile(
        rank=rank,
        peak_bytes=peak.total,
        peak_order=peak.order,
        peak_phase=peak.charged_to.phase,
        peak_module=names.name(peak.charged_to.module),
        at_peak=tuple(_memory_uses(allocation_log, replay.sizes, peak.order, names)),
        samples=tuple(_sample(moment, names) for moment in _choose(step, peak)),
        first_peak_bytes=max(moment.total for moment in first),
        reserved_bytes=replay.reserved_bytes,
        allocations=_make_table(allocation_log, replay, names, first=begin, last=ends[-1]),
    )


def assign_kinds(allocation_log: AllocationLog) -> None:
    """Give every allocation that was not claimed a kind."""
    backward = [
        event.allocation.start
        for event in allocation_log.events
        if event.is_start and event.allocation.charged_to.phase is Phase.BACKWARD
    ]
    for allocation in (
        *allocation_log.before,
        *(event.allocation for event in allocation_log.events),
    ):
        if allocation.kind is None:
            allocation.kind = _find_kind(allocation, backward)


def _find_kind(allocation: Allocation, backward: list[int]) -> MemoryKind:
    """The kind of an unclaimed allocation: an activation if it is alive in backward."""
    communicated = allocation.is_communicated
    if allocation.start < 0:  # there before the step: its inputs, or DDP's buckets
        return MemoryKind.COMMUNICATION if communicated else MemoryKind.ACTIVATIONS
    if allocation.charged_to.phase in (Phase.FORWARD, Phase.RECOMPUTE, Phase.OUTSIDE):
        index = bisect_right(backward, allocation.start)
        if index < len(backward) and (allocation.end is None or backward[index] < allocation.end):
            return MemoryKind.ACTIVATIONS
    return MemoryKind.COMMUNICATION if communicated else MemoryKind.TEMPORARIES


@final
class _Replay:
    """Replays the events with a model of the GPU's allocator."""

    def __init__(self, allocation_log: AllocationLog) -> None:
        self._allocation_log = allocation_log
        self._allocator = CachingAllocator()
        self._blocks: dict[int, Block] = {}
        self._by_kind = [0] * len(_KINDS)
        self._charged_to = PhaseAndModule(Phase.OUTSIDE, -1)
        self.sizes: dict[int, int] = {}  # of the block that an allocation got
        self.addresses: dict[int, int] = {}
        self.segment_orders: list[int] = []
        self._order = 0
        for allocation in allocation_log.before:
            self._begin(allocation)

    @property
    def reserved_bytes(self) -> int:
        return self._allocator.reserved_bytes

    def list_segments(self) -> SegmentTable:
        """The segments that were reserved so far."""
        segments = self._allocator.segments
        return SegmentTable(
            address=tuple(address for address, _ in segments),
            num_bytes=tuple(size for _, size in segments),
            order=tuple(self.segment_orders),
        )

    def run(self, first: int, last: int) -> Iterator[_MemoryAtEvent]:
        """The memory before the event `first` and after each event up to `last`."""
        yield self._read(max(0, first - 1))
        for order in range(first, last):
            allocation, is_start = self._allocation_log.events[order]
            if allocation.is_on_host:
                continue
            self._order = order
            if is_start:
                self._charged_to = allocation.charged_to
                self._begin(allocation)
            else:
                self._end(allocation)
            yield self._read(order)

    def _begin(self, allocation: Allocation) -> None:
        if not allocation.is_on_host:
            block = self._allocator.allocate(allocation.num_bytes)
            self._blocks[id(allocation)] = block
            self.sizes[id(allocation)] = block.size
            self.addresses[id(allocation)] = block.address
            num_new = len(self._allocator.segments) - len(self.segment_orders)
            self.segment_orders += [self._order] * num_new
            self._count(allocation, block.size)

    def _end(self, allocation: Allocation) -> None:
        block = self._blocks.pop(id(allocation))
        self._count(allocation, -block.size)
        self._allocator.release(block)

    def _count(self, allocation: Allocation, num_bytes: int) -> None:
        assert allocation.kind is not None
        self._by_kind[_KINDS[allocation.kind]] += num_bytes

    def _read(self, order: int) -> _MemoryAtEvent:
        total = self._allocator.allocated_bytes
        return _MemoryAtEvent(order, self._charged_to, total, tuple(self._by_kind))


def _memory_uses(
    allocation_log: AllocationLog, sizes: dict[int, int], order: int, names: ModuleNames
) -> Iterator[MemoryUse]:
    """The bytes by kind and module after an event, the largest first."""
    uses: Counter[tuple[MemoryKind, str | None]] = Counter()
    started = (event.allocation for event in allocation_log.events[: order + 1] if event.is_start)
    for allocation in (*allocation_log.before, *started):
        is_allocated = allocation.end is None or allocation.end > order
        if is_allocated and id(allocation) in sizes and allocation.kind is not None:
            for owner, num_bytes in allocation.split(sizes[id(allocation)]):
                uses[allocation.kind, names.name(owner)] += num_bytes
    for (kind, module), num_bytes in uses.most_common():
        if num_bytes:
            yield MemoryUse(kind=kind, module=module, num_bytes=num_bytes)


def _choose(step: list[_MemoryAtEvent], peak: _MemoryAtEvent) -> list[_MemoryAtEvent]:
    """Samples of a step: the highest and the lowest of each of many short spans, and the peak."""
    num_spans = MAX_SAMPLES // 2 - 2
    if len(step) <= MAX_SAMPLES:
        return step
    chosen = {step[0].order: step[0], step[-1].order: step[-1], peak.order: peak}
    for index in range(num_spans):
        span = step[index * len(step) // num_spans : (index + 1) * len(step) // num_spans]
        for moment in (max(span, key=_total), min(span, key=_total)):
            chosen[moment.order] = moment
    return [chosen[order] for order in sorted(chosen)]


def _total(moment: _MemoryAtEvent) -> int:
    return moment.total


def _sample(moment: _MemoryAtEvent, names: ModuleNames) -> MemorySample:
    return MemorySample(
        order=moment.order,
        phase=moment.charged_to.phase,
        module=names.name(moment.charged_to.module),
        num_bytes=moment.by_kind,
    )


class _Row(NamedTuple):
    """The part of an allocation that belongs to one module."""

    allocation: Allocation
    number: int  # of the allocation
    owner: int
    num_bytes: int


def _make_table(
    allocation_log: AllocationLog, replay: _Replay, names: ModuleNames, *, first: int, last: int
) -> AllocationTable:
    """The allocations that were in use between the events `first` and `last`."""
    rows = _list_rows(allocation_log, replay.sizes, first=first, last=last)
    rows, left_out = _choose_rows(rows)
    modules: dict[str, int] = {}
    sources: dict[Source, int] = {}
    owners = [names.name(row.owner) for row in rows]
    lines = [row.allocation.source for row in rows]
    return AllocationTable(
        first_order=first,
        last_order=max(first, last - 1),
        start=tuple(row.number for row in rows),
        end=tuple(_find_end(row.allocation, last) for row in rows),
        num_bytes=tuple(row.num_bytes for row in rows),
        address=tuple(replay.addresses[id(row.allocation)] for row in rows),
        kind=tuple(_KINDS[row.allocation.kind] for row in rows if row.allocation.kind is not None),
        phase=tuple(_PHASES[row.allocation.charged_to.phase] for row in rows),
        module=tuple(_position(modules, owner) for owner in owners),
        source=tuple(_position(sources, line) for line in lines),
        modules=tuple(modules),
        sources=tuple(sources),
        segments=replay.list_segments(),
        num_left_out=len({row.number for row in left_out}),
        max_left_out_bytes=max((row.num_bytes for row in left_out), default=0),
    )


def describe_left_out(table: AllocationTable) -> str:
    """Which allocations a table lacks, for a gap."""
    return (
        f"{plural(table.num_left_out, 'allocation')} of at most "
        f"{format_bytes(table.max_left_out_bytes)} are not listed: a recording lists the "
        f"{MAX_ROWS:,} largest"
    )


def _list_rows(
    allocation_log: AllocationLog, sizes: dict[int, int], *, first: int, last: int
) -> list[_Row]:
    """Rows of the allocations of a step; those from before all steps have negative numbers."""
    before = ((-1 - index, entry) for index, entry in enumerate(allocation_log.before))
    events = allocation_log.events[:last]
    started = ((event.allocation.start, event.allocation) for event in events if event.is_start)
    rows: list[_Row] = []
    for number, allocation in (*reversed(list(before)), *started):
        is_counted = id(allocation) in sizes and allocation.kind is not None
        if is_counted and _find_end(allocation, last) > first:
            owners: Counter[int] = Counter()
            for owner, num_bytes in allocation.split(sizes[id(allocation)]):
                owners[owner] += num_bytes
            rows += (_Row(allocation, number, *item) for item in owners.items() if item[1])
    return rows


def _choose_rows(rows: list[_Row]) -> tuple[list[_Row], list[_Row]]:
    """The rows of the largest allocations, in their order, and those that are left out."""
    if len(rows) <= MAX_ROWS:
        return rows, []
    sizes: Counter[int] = Counter()
    for row in rows:
        sizes[row.number] += row.num_bytes
    by_size = sorted(rows, key=lambda row: (-sizes[row.number], row.number))
    num_listed = MAX_ROWS
    while by_size[num_listed - 1].number == by_size[MAX_ROWS].number:
        num_listed -= 1  # all parts of an allocation are listed, or none
    numbers = {row.number for row in by_size[:num_listed]}
    return [row for row in rows if row.number in numbers], by_size[num_listed:]


def _find_end(allocation: Allocation, last: int) -> int:
    return last if allocation.end is None else min(allocation.end, last)


def _position(positions: dict[_T, int], value: _T | None) -> int:
    return NO_POSITION if value is None else positions.setdefault(value, len(positions))
