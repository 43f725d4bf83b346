"""The log of a step's allocations, the storages that are alive, and the profile of the log."""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple, final

import torch

from shardscope._torch.cuda.caching_allocator import Block, CachingAllocator
from shardscope._torch.fake_models import FakeSubstitution
from shardscope._torch.storage import plain_tensors
from shardscope.attribution.module_names import ModuleNames
from shardscope.record import MemoryKind, MemoryProfile, MemorySample, MemoryUse, Phase

Shares = Mapping[Hashable, tuple[int, int]]
"""What is in an allocation: by anything that tells the parts apart, the owner and the bytes."""


class PhaseAndModule(NamedTuple):
    """The phase of the step, and the index of the module."""

    phase: Phase
    module: int


_CLAIMS = (  # the strongest last
    MemoryKind.TEMPORARIES,
    MemoryKind.COMMUNICATION,
    MemoryKind.GATHERED,
    MemoryKind.GRADIENTS,
    MemoryKind.OPTIMIZER_STATE,
    MemoryKind.PARAMETERS,
)


@final
class Allocation:
    """Bytes in use from event `start` to event `end`, or to the end of the log if that is None."""

    __slots__ = (
        "charged_to",
        "end",
        "is_buffer",
        "is_communicated",
        "is_on_host",
        "kind",
        "num_bytes",
        "owner",
        "shares",
        "start",
    )

    def __init__(self, num_bytes: int, charged_to: PhaseAndModule) -> None:
        self.num_bytes = num_bytes
        self.charged_to = charged_to
        self.owner = charged_to.module  # of what no share names
        self.shares: dict[Hashable, tuple[int, int]] = {}
        self.start = 0
        self.end: int | None = None
        self.kind: MemoryKind | None = None  # as claimed
        self.is_buffer = False  # allocated empty, to be written to
        self.is_communicated = False
        self.is_on_host = False

    def claim(self, kind: MemoryKind, shares: Shares | None = None) -> None:
        """Set the kind, unless a stronger claim was made.

        `shares` are the owning modules. A storage may hold the gradients or parameters of many
        modules, as FSDP's and DDP's buffers do: claims of the same kind add their shares.
        """
        strength = _CLAIMS.index(kind) - (-1 if self.kind is None else _CLAIMS.index(self.kind))
        if strength > 0:
            self.kind = kind
            if shares:
                self.shares = dict(shares)
        elif strength == 0:
            for part, share in (shares or {}).items():
                self.shares.setdefault(part, share)

    def split(self, num_bytes: int) -> Iterator[tuple[int, int]]:
        """The owners of an allocation of `num_bytes`, each with its bytes; they sum to `num_bytes`.

        Padding and rounding are divided as the shares are.
        """
        total = sum(size for _, size in self.shares.values())
        if not total:
            yield self.owner, num_bytes
            return
        shares_sum = assigned = 0
        for owner, size in self.shares.values():
            shares_sum += size
            part = num_bytes * shares_sum // total - assigned
            assigned += part
            yield owner, part


class Event(NamedTuple):
    """An allocation begins or ends."""

    allocation: Allocation
    is_start: bool


@final
class AllocationLog:
    """Allocations and releases in the order in which they happened."""

    def __init__(self) -> None:
        self.before: list[Allocation] = []  # there when the first step began
        self.events: list[Event] = []

    def begin(self, num_bytes: int, charged_to: PhaseAndModule) -> Allocation:
        """Log an allocation."""
        allocation = Allocation(num_bytes, charged_to)
        allocation.start = len(self.events)
        self.events.append(Event(allocation, True))
        return allocation

    def find_before(self, num_bytes: int, charged_to: PhaseAndModule) -> Allocation:
        """Log an allocation that existed before the first step."""
        allocation = Allocation(num_bytes, charged_to)
        allocation.start = -1
        self.before.append(allocation)
        return allocation

    def has_backward(self) -> bool:
        """Whether anything was allocated in backward."""
        return any(event.allocation.charged_to.phase is Phase.BACKWARD for event in self.events)

    def end(self, allocation: Allocation) -> None:
        """Log that the allocation is freed."""
        allocation.end = len(self.events)
        self.events.append(Event(allocation, False))

    def use_briefly(self, num_bytes: int, charged_to: PhaseAndModule) -> None:
        """Log an allocation that is freed within the same op."""
        if num_bytes > 0:
            self.end(self.begin(num_bytes, charged_to))


@final
class _StorageEntry:
    """A storage's allocation, and the weak reference whose callback logs its end."""

    __slots__ = ("allocation", "num_bytes", "reference")

    def __init__(self, allocation: Allocation | None, num_bytes: int) -> None:
        self.allocation = allocation
        self.num_bytes = num_bytes
        self.reference: weakref.ref[torch.UntypedStorage] | None = None


@final
class LiveStorages:
    """Logs an allocation when a storage is first seen, and its end when the storage is freed.

    Memory belongs to storages, which tensors share. Only those on devices of `device_type` are
    counted.
    """

    def __init__(
        self,
        allocation_log: AllocationLog,
        *,
        device_type: str,
        read_current: Callable[[], PhaseAndModule],
        substitution: FakeSubstitution,
    ) -> None:
        self._allocation_log = allocation_log
        self._device_type = device_type
        self._read_current = read_current
        self._substitution = substitution
        # A storage keeps its Python object as long as it lives, so that the object's id is its own.
        self._entries: dict[int, _StorageEntry] = {}

    def find_or_begin(self, tensor: torch.Tensor) -> Allocation | None:
        """The allocation of an op's result, which begins now if its storage is new."""
        if not self._is_counted(tensor):
            return None
        storage = tensor.untyped_storage()
        entry = self._entries.get(id(storage))
        if entry is None:
            entry = self._add_entry(storage)
            self._begin(entry)
        elif entry.num_bytes != storage.nbytes():
            self.resize(storage)
        return entry.allocation

    def find_existing(self, tensor: torch.Tensor) -> Allocation | None:
        """The allocation of a tensor that may have been created before it was observed."""
        tensor = self._substitution.of(tensor)
        if not self._is_counted(tensor):
            return None
        storage = tensor.untyped_storage()
        entry = self._entries.get(id(storage))
        if entry is None:
            entry = self._add_entry(storage)
            if entry.num_bytes:
                charged_to = self._read_current()
                entry.allocation = self._allocation_log.find_before(entry.num_bytes, charged_to)
        return entry.allocation

    def find_allocations(self, tensor: torch.Tensor) -> Iterator[Allocation]:
        """The allocations of the plain tensors inside `tensor`, which may be a wrapper subclass."""
        for allocation, _, _ in self.find_parts(tensor):
            yield allocation

    def find_parts(self, tensor: torch.Tensor) -> Iterator[tuple[Allocation, int, int]]:
        """The allocations of `tensor`, with its offset and size in each, both in bytes."""
        for plain in plain_tensors(tensor):
            allocation = self.find_existing(plain)
            if allocation is not None:
                size = plain.element_size()
                yield allocation, int(plain.storage_offset()) * size, plain.numel() * size

    def resize(self, storage: torch.UntypedStorage) -> None:
        """Log that a storage was resized: the old allocation ends, a new one begins."""
        entry = self._entries.get(id(storage))
        if entry is None:
            if storage.device.type == self._device_type:
                self._begin(self._add_entry(storage))
            return
        if entry.num_bytes == storage.nbytes():
            return
        old = entry.allocation
        if old is not None and old.end is None:
            self._allocation_log.end(old)
        entry.num_bytes = storage.nbytes()
        self._begin(entry)
        if old is not None and entry.allocation not in (None, old):
            assert entry.allocation is not None
            entry.allocation.kind = old.kind
            entry.allocation.owner = old.owner
            entry.allocation.shares = dict(old.shares)

    def _is_counted(self, tensor: torch.Tensor) -> bool:
        # A sparse tensor has no storage of its own: its indices and values have.
        return tensor.device.type == self._device_type and tensor.layout is torch.strided

    def _begin(self, entry: _StorageEntry) -> None:
        if entry.num_bytes:
            entry.allocation = self._allocation_log.begin(entry.num_bytes, self._read_current())

    def _add_entry(self, storage: torch.UntypedStorage) -> _StorageEntry:
        key = id(storage)
        entry = _StorageEntry(None, storage.nbytes())
        entry.reference = weakref.ref(storage, partial(self._on_storage_freed, key))
        self._entries[key] = entry
        return entry

    def _on_storage_freed(self, key: int, _: object) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None and entry.allocation is not None and entry.allocation.end is None:
            self._allocation_log.end(entry.allocation)


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
