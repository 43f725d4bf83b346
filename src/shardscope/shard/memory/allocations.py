"""The log of a step's allocations, and the storages that are alive."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping
from functools import partial
from typing import NamedTuple, final

import torch

from shardscope._torch.fake_models import FakeSubstitution
from shardscope._torch.storage import plain_tensors
from shardscope.record import MemoryKind, Phase, Source

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
        "source",
        "start",
    )

    def __init__(
        self, num_bytes: int, charged_to: PhaseAndModule, source: Source | None = None
    ) -> None:
        self.num_bytes = num_bytes
        self.charged_to = charged_to
        self.source = source  # the user's line that allocated it
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
    """Allocations and releases in the order in which they happened.

    `read_source` returns the line of the user's program that is running.
    """

    def __init__(self, read_source: Callable[[], Source | None] = lambda: None) -> None:
        self._read_source = read_source
        self.before: list[Allocation] = []  # there when the first step began
        self.events: list[Event] = []

    def begin(self, num_bytes: int, charged_to: PhaseAndModule) -> Allocation:
        """Log an allocation."""
        allocation = Allocation(num_bytes, charged_to, self._read_source())
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
