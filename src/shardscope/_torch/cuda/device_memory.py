"""The memory of simulated GPUs: the storages of tensors without data, in a model of the allocator.

Counted from the first tensor of the program on, as torch's allocator does: each storage on a GPU
when an op returns it first, until it is freed or resized, and the workspaces of kernels.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, final

import torch

from shardscope._torch.cuda.caching_allocator import CONTEXT_BYTES, Block, CachingAllocator
from shardscope._torch.cuda.workspaces import CublasHandles, workspace_bytes
from shardscope._torch.dtensor import ShapePropagationTracker
from shardscope._torch.fake import FakeTensor
from shardscope._torch.private import without_if_moved
from shardscope._torch.storage import watched_resizes
from shardscope._torch.tree import leaves


@final
class _StorageEntry:
    """A storage's block on a device; `reference` reports when the storage is freed."""

    __slots__ = ("block", "index", "num_bytes", "reference")

    def __init__(self, index: int) -> None:
        self.index = index
        self.num_bytes = 0
        self.block: Block | None = None
        self.reference: weakref.ref[torch.UntypedStorage] | None = None


@final
class DeviceMemory:
    """The memory of all GPUs of a simulated host that this process uses."""

    def __init__(self, num_devices: int) -> None:
        self._allocators = [CachingAllocator() for _ in range(num_devices)]
        self._handles = [CublasHandles() for _ in range(num_devices)]
        self._entries: dict[int, _StorageEntry] = {}  # by the id of the storage
        # Storages may be freed at any moment, also by the garbage collector while a block is
        # being taken; their blocks are released before the next use of the allocator.
        self._freed: deque[_StorageEntry] = deque()
        self._lock = threading.Lock()
        self._trials = ShapePropagationTracker()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Observe resizes of storages, which no op performs, until the context ends."""
        with ExitStack() as stack:
            stack.enter_context(without_if_moved(self._trials.watching()))
            stack.enter_context(watched_resizes(self._resize))
            yield

    def note_op(self, op: Any, args: Any, result: Any) -> None:
        """Count what an op has allocated: new storages among its results, and its workspace."""
        if (
            self._trials.is_on()
        ):  # DTensor computes the shapes of global tensors, which use no memory
            return
        index = None
        for tensor in leaves(result):
            if isinstance(tensor, FakeTensor) and tensor.fake_device.type == "cuda":
                index = tensor.fake_device.index or 0
                if tensor.layout is torch.strided:
                    self._note_storage(tensor.untyped_storage(), index)
        if index is not None:
            self._note_workspace(op, args, index)

    def read(self, index: int) -> CachingAllocator:
        """The allocator of a device, with everything released that is free."""
        with self._lock:
            self._release_freed()
        return self._allocators[index]

    def used_bytes(self, index: int) -> int:
        """What is taken of a device: by the allocator, and by CUDA itself."""
        return self.read(index).reserved_bytes + CONTEXT_BYTES

    def _note_storage(self, storage: Any, index: int) -> None:
        entry = self._entries.get(id(storage))
        if entry is None:
            entry = _StorageEntry(index)
            entry.reference = weakref.ref(storage, partial(self._on_freed, id(storage)))
            self._entries[id(storage)] = entry
        if entry.num_bytes != storage.nbytes():
            self._set_size(entry, storage.nbytes())

    def _resize(self, storage: Any) -> None:
        entry = self._entries.get(id(storage))
        if entry is not None and entry.num_bytes != storage.nbytes():
            self._set_size(entry, storage.nbytes())

    def _set_size(self, entry: _StorageEntry, num_bytes: int) -> None:
        with self._lock:
            self._release_freed()
            allocator = self._allocators[entry.index]
            if entry.block is not None:
                allocator.release(entry.block)
            entry.block = allocator.allocate(num_bytes) if num_bytes else None
            entry.num_bytes = num_bytes

    def _note_workspace(self, op: Any, args: Any, index: int) -> None:
        handle_bytes = self._handles[index].create_for(op)
        temporary_bytes = workspace_bytes(op, args)
        if handle_bytes or temporary_bytes:
            with self._lock:
                self._release_freed()
                allocator = self._allocators[index]
                if handle_bytes:  # never released
                    allocator.allocate(handle_bytes)
                if temporary_bytes:
                    allocator.release(allocator.allocate(temporary_bytes))

    def _on_freed(self, key: int, _: object) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self._freed.append(entry)

    def _release_freed(self) -> None:
        while self._freed:
            entry = self._freed.popleft()
            if entry.block is not None:
                self._allocators[entry.index].release(entry.block)
                entry.block = None
