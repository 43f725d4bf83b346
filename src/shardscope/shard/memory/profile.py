"""The memory profile of an allocation log: purposes and peak, by a model of CUDA's allocator."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple, final

from shardscope._torch.cuda.caching_allocator import Block, CachingAllocator
from shardscope.attribution.module_names import ModuleNames
from shardscope.record import MemoryKind, MemoryProfile, MemorySample, MemoryUse, Phase
from shardscope.shard.memory.allocations import Allocation, AllocationLog, PhaseAndModule

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
