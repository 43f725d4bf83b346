"""The storages that are alive, each with its allocation."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import final

import torch

from shardscope._torch.fake_models import StandIns
from shardscope._torch.storages import plain_tensors
from shardscope.shard.ledger import Allocation, Ledger, Place

__all__ = ["LiveStorages"]


@final
class _Held:
    """A storage's allocation, and the reference that tells of its end."""

    __slots__ = ("allocation", "num_bytes", "reference")

    def __init__(self, allocation: Allocation | None, num_bytes: int) -> None:
        self.allocation = allocation
        self.num_bytes = num_bytes
        self.reference: weakref.ref[torch.UntypedStorage] | None = None


@final
class LiveStorages:
    """Writes an allocation down when a storage is first met, and its end when it dies.

    Tensors come and go and share storages; memory is the storages'. Only those on devices of the
    type given are counted.
    """

    def __init__(
        self,
        ledger: Ledger,
        *,
        device_type: str,
        read_place: Callable[[], Place],
        stand_ins: StandIns,
    ) -> None:
        self._ledger = ledger
        self._device_type = device_type
        self._read_place = read_place
        self._stand_ins = stand_ins
        # A storage keeps its Python object as long as it lives, so that the object's id is its own.
        self._held: dict[int, _Held] = {}

    def meet_new(self, tensor: torch.Tensor) -> Allocation | None:
        """The allocation of a tensor that an op has made, which begins now if it is not known."""
        if not self._is_counted(tensor):
            return None
        storage = tensor.untyped_storage()
        held = self._held.get(id(storage))
        if held is None:
            held = self._hold(storage)
            self._begin(held)
        elif held.num_bytes != storage.nbytes():
            self.resize(storage)
        return held.allocation

    def meet_old(self, tensor: torch.Tensor) -> Allocation | None:
        """The allocation of a tensor that was made while nobody looked."""
        tensor = self._stand_ins.of(tensor)
        if not self._is_counted(tensor):
            return None
        storage = tensor.untyped_storage()
        held = self._held.get(id(storage))
        if held is None:
            held = self._hold(storage)
            if held.num_bytes:
                place = self._read_place()
                held.allocation = self._ledger.find_before(held.num_bytes, place)
        return held.allocation

    def meet_held(self, tensor: torch.Tensor) -> Iterator[Allocation]:
        """The allocations behind a tensor that was made while nobody looked, wrapped or not."""
        for allocation, _, _ in self.meet_parts(tensor):
            yield allocation

    def meet_parts(self, tensor: torch.Tensor) -> Iterator[tuple[Allocation, int, int]]:
        """The same, with where in each of them the tensor begins, and its size, both in bytes."""
        for plain in plain_tensors(tensor):
            allocation = self.meet_old(plain)
            if allocation is not None:
                size = plain.element_size()
                yield allocation, int(plain.storage_offset()) * size, plain.numel() * size

    def resize(self, storage: torch.UntypedStorage) -> None:
        """A storage has become larger or smaller: what it had is given back, what it has begins."""
        held = self._held.get(id(storage))
        if held is None:
            if storage.device.type == self._device_type:
                self._begin(self._hold(storage))
            return
        if held.num_bytes == storage.nbytes():
            return
        old = held.allocation
        if old is not None and old.end is None:
            self._ledger.end(old)
        held.num_bytes = storage.nbytes()
        self._begin(held)
        if old is not None and held.allocation not in (None, old):
            assert held.allocation is not None
            held.allocation.kind = old.kind
            held.allocation.owner = old.owner
            held.allocation.shares = dict(old.shares)

    def _is_counted(self, tensor: torch.Tensor) -> bool:
        # A sparse tensor has no storage of its own: its indices and values have.
        return tensor.device.type == self._device_type and tensor.layout is torch.strided

    def _begin(self, held: _Held) -> None:
        if held.num_bytes:
            held.allocation = self._ledger.begin(held.num_bytes, self._read_place())

    def _hold(self, storage: torch.UntypedStorage) -> _Held:
        key = id(storage)
        held = _Held(None, storage.nbytes())
        held.reference = weakref.ref(storage, partial(self._forget, key))
        self._held[key] = held
        return held

    def _forget(self, key: int, _: object) -> None:
        held = self._held.pop(key, None)
        if held is not None and held.allocation is not None and held.allocation.end is None:
            self._ledger.end(held.allocation)
