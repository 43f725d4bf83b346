"""A ledger as a profile: what each allocation was for, how much was held when, and the peak."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple, final

from shardscope.comm.names import ModuleNames
from shardscope.record import MemoryKind, MemoryProfile, MemorySample, MemoryUse, Phase
from shardscope.shard.allocator import Block, CachingAllocator
from shardscope.shard.ledger import Allocation, Ledger, Place

__all__ = ["MAX_SAMPLES", "make_profile"]

MAX_SAMPLES = 500
_KINDS = {kind: index for index, kind in enumerate(MemoryKind)}


class _Moment(NamedTuple):
    """What is held after an event."""

    order: int
    place: Place
    total: int
    by_kind: tuple[int, ...]


def make_profile(
    ledger: Ledger, names: ModuleNames, *, rank: int, ends: Sequence[int]
) -> MemoryProfile:
    """The profile of the last step; `ends` says after how many events each step ended."""
    settle_kinds(ledger)
    replay = _Replay(ledger)
    begin = ends[-2] if len(ends) > 1 else 0
    before, step = list(replay.run(0, begin)), list(replay.run(begin, ends[-1]))
    first = before if len(ends) > 1 else step
    peak = max(step, key=lambda moment: moment.total)
    return MemoryProfile(
        rank=rank,
        peak_bytes=peak.total,
        peak_order=peak.order,
        peak_phase=peak.place.phase,
        peak_module=names.name(peak.place.module),
        at_peak=tuple(_uses_at(ledger, replay.sizes, peak.order, names)),
        samples=tuple(_sample(moment, names) for moment in _choose(step, peak)),
        first_peak_bytes=max(moment.total for moment in first),
        reserved_bytes=replay.reserved_bytes,
    )


def settle_kinds(ledger: Ledger) -> None:
    """Give every allocation that nobody has claimed its kind."""
    backward = [
        event.allocation.start
        for event in ledger.events
        if event.is_start and event.allocation.place.phase is Phase.BACKWARD
    ]
    for allocation in (*ledger.before, *(event.allocation for event in ledger.events)):
        if allocation.kind is None:
            allocation.kind = _find_kind(allocation, backward)


def _find_kind(allocation: Allocation, backward: list[int]) -> MemoryKind:
    """An activation outlives forward; what does not, served a collective or was needed briefly."""
    communicated = allocation.is_communicated
    if allocation.start < 0:  # there before the step: its inputs, or DDP's buckets
        return MemoryKind.COMMUNICATION if communicated else MemoryKind.ACTIVATIONS
    if allocation.place.phase in (Phase.FORWARD, Phase.RECOMPUTE, Phase.OUTSIDE):
        index = bisect_right(backward, allocation.start)
        if index < len(backward) and (allocation.end is None or backward[index] < allocation.end):
            return MemoryKind.ACTIVATIONS
    return MemoryKind.COMMUNICATION if communicated else MemoryKind.TEMPORARIES


@final
class _Replay:
    """The events once more, with the allocator that a GPU would have."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._allocator = CachingAllocator()
        self._blocks: dict[int, Block] = {}
        self._by_kind = [0] * len(_KINDS)
        self._place = Place(Phase.OUTSIDE, -1)
        self.sizes: dict[int, int] = {}  # of the block that an allocation got
        for allocation in ledger.before:
            self._begin(allocation)

    @property
    def reserved_bytes(self) -> int:
        return self._allocator.reserved_bytes

    def run(self, first: int, last: int) -> Iterator[_Moment]:
        """What is held before the event `first` and after each of those up to `last`."""
        yield self._read(first)
        for order in range(first, last):
            allocation, is_start = self._ledger.events[order]
            if allocation.is_on_host:
                continue
            if is_start:
                self._place = allocation.place
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

    def _read(self, order: int) -> _Moment:
        total = self._allocator.allocated_bytes
        return _Moment(order, self._place, total, tuple(self._by_kind))


def _uses_at(
    ledger: Ledger, sizes: dict[int, int], order: int, names: ModuleNames
) -> Iterator[MemoryUse]:
    """Who held what after an event, the most first."""
    uses: Counter[tuple[MemoryKind, str | None]] = Counter()
    started = (event.allocation for event in ledger.events[: order + 1] if event.is_start)
    for allocation in (*ledger.before, *started):
        is_held = allocation.end is None or allocation.end > order
        if is_held and id(allocation) in sizes and allocation.kind is not None:
            for owner, num_bytes in allocation.split(sizes[id(allocation)]):
                uses[allocation.kind, names.name(owner)] += num_bytes
    for (kind, module), num_bytes in uses.most_common():
        if num_bytes:
            yield MemoryUse(kind=kind, module=module, num_bytes=num_bytes)


def _choose(step: list[_Moment], peak: _Moment) -> list[_Moment]:
    """The highest and the lowest moment of each of many short spans, and the peak."""
    num_spans = MAX_SAMPLES // 2 - 2
    if len(step) <= MAX_SAMPLES:
        return step
    chosen = {step[0].order: step[0], step[-1].order: step[-1], peak.order: peak}
    for index in range(num_spans):
        span = step[index * len(step) // num_spans : (index + 1) * len(step) // num_spans]
        for moment in (max(span, key=_total), min(span, key=_total)):
            chosen[moment.order] = moment
    return [chosen[order] for order in sorted(chosen)]


def _total(moment: _Moment) -> int:
    return moment.total


def _sample(moment: _Moment, names: ModuleNames) -> MemorySample:
    return MemorySample(
        order=moment.order,
        phase=moment.place.phase,
        module=names.name(moment.place.module),
        num_bytes=moment.by_kind,
    )
