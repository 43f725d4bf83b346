"""The memory profile of an allocation log: purposes, peak, and CUDA's caching allocator."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple, final

from shardscope.attribution.module_names import ModuleNames
from shardscope.record import MemoryKind, MemoryProfile, MemorySample, MemoryUse, Phase
from shardscope.shard.memory.allocations import Allocation, AllocationLog, PhaseAndModule

_ALIGNMENT = 512
_SMALL = 1 << 20  # requests up to here share small segments
_SMALL_SEGMENT = 2 << 20
_LARGE_SEGMENT = 20 << 20
_MIN_OWN_SEGMENT = 10 << 20  # requests from here on get a segment of their own
_SEGMENT_ALIGNMENT = 2 << 20


@final
class Block:
    """A part of a segment of the allocator, with the blocks before and after it."""

    __slots__ = ("after", "before", "is_free", "is_small", "number", "size")

    def __init__(self, size: int, number: int, *, is_small: bool) -> None:
        self.size = size
        self.number = number  # its position: segments by age, blocks by address
        self.is_small = is_small
        self.is_free = False
        self.before: Block | None = None
        self.after: Block | None = None


@final
class CachingAllocator:
    """Models CUDA's caching allocator: counts allocated bytes and bytes reserved on the device."""

    def __init__(self) -> None:
        self.allocated_bytes = 0
        self.reserved_bytes = 0
        self._free: dict[bool, list[tuple[int, int]]] = {True: [], False: []}  # by size, number
        self._blocks: dict[int, Block] = {}  # free ones, by number
        self._next_address = 0

    def allocate(self, num_bytes: int) -> Block:
        """The smallest free block that is large enough, split if the rest is worth keeping."""
        size = max(_ALIGNMENT, -(-num_bytes // _ALIGNMENT) * _ALIGNMENT)
        is_small = size <= _SMALL
        block = self._take(size, is_small) or self._reserve(size, is_small)
        rest = block.size - size
        if rest >= _ALIGNMENT if is_small else rest > _SMALL:
            self._split(block, size)
        self.allocated_bytes += block.size
        return block

    def release(self, block: Block) -> None:
        """Free a block, and merge it with free neighbours."""
        self.allocated_bytes -= block.size
        for neighbour in (block.before, block.after):
            if neighbour is not None and neighbour.is_free:
                self._remove(neighbour)
                block = _join(neighbour, block)
        self._add(block)

    def _take(self, size: int, is_small: bool) -> Block | None:
        pool = self._free[is_small]
        index = bisect_left(pool, (size, -1))
        if index == len(pool):
            return None
        block = self._blocks[pool[index][1]]
        self._remove(block)
        return block

    def _reserve(self, size: int, is_small: bool) -> Block:
        if is_small:
            segment = _SMALL_SEGMENT
        elif size < _MIN_OWN_SEGMENT:
            segment = _LARGE_SEGMENT
        else:
            segment = -(-size // _SEGMENT_ALIGNMENT) * _SEGMENT_ALIGNMENT
        self.reserved_bytes += segment
        block = Block(segment, self._next_address, is_small=is_small)
        self._next_address += segment
        return block

    def _split(self, block: Block, size: int) -> None:
        rest = Block(block.size - size, block.number + size, is_small=block.is_small)
        rest.before, rest.after = block, block.after
        if block.after is not None:
            block.after.before = rest
        block.after, block.size = rest, size
        self._add(rest)

    def _add(self, block: Block) -> None:
        block.is_free = True
        self._blocks[block.number] = block
        insort(self._free[block.is_small], (block.size, block.number))

    def _remove(self, block: Block) -> None:
        block.is_free = False
        pool = self._free[block.is_small]
        del pool[bisect_left(pool, (block.size, block.number))]
        del self._blocks[block.number]


def _join(block: Block, neighbour: Block) -> Block:
    """Merge two adjacent blocks."""
    first, second = (block, neighbour) if block.number < neighbour.number else (neighbour, block)
    first.size += second.size
    first.after = second.after
    if second.after is not None:
        second.after.before = first
    return first


MAX_SAMPLES = 500
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
        for allocation in allocation_log.before:
            self._begin(allocation)

    @property
    def reserved_bytes(self) -> int:
        return self._allocator.reserved_bytes

    def run(self, first: int, last: int) -> Iterator[_MemoryAtEvent]:
        """The memory before the event `first` and after each event up to `last`."""
        yield self._read(first)
        for order in range(first, last):
            allocation, is_start = self._allocation_log.events[order]
            if allocation.is_on_host:
                continue
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
