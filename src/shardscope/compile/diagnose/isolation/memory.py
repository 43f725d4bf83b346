"""Tensors on their way to another process: their memory, and how each looks at it."""

from __future__ import annotations

import ctypes
import pickle
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import nn

from shardscope.compile.diagnose.leaves import is_computed, make_computed

__all__ = ["Memories", "Memory", "allocate"]


@final
@dataclass(frozen=True, eq=False)
class Memory:
    """A storage; tensors that share it refer to the same one."""

    storage: torch.UntypedStorage

    @property
    def device(self) -> str:
        """Where it is."""
        return str(self.storage.device)

    def buffer(self) -> pickle.PickleBuffer:
        """Its bytes: the memory itself, if this processor can read it."""
        size = self.storage.nbytes()
        if size == 0:
            return pickle.PickleBuffer(b"")
        if self.storage.device.type != "cpu":
            copy: Any = self.storage.cpu()  # type: ignore[no-untyped-call]
            return pickle.PickleBuffer(ctypes.string_at(copy.data_ptr(), size))
        array = ctypes.c_char * size
        return pickle.PickleBuffer(array.from_address(self.storage.data_ptr()))


@final
class Memories:
    """All storages of one message, each once."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, int, int], Memory] = {}
        self._empty: list[Memory] = []  # without an address, so each for itself
        self._stripped: dict[int, torch.Tensor] = {}

    def strip(self, values: Iterable[object]) -> None:
        """Leave out what Python code has attached to these tensors."""
        tensors = (value for value in values if isinstance(value, torch.Tensor))
        self._stripped.update((id(tensor), tensor) for tensor in tensors)

    def reduce(self, tensor: torch.Tensor) -> Any:
        """How pickle makes a tensor again; those of odd kinds are left to torch."""
        if not _is_plain(tensor):
            return NotImplemented
        view = (tensor.dtype, tensor.size(), tensor.stride(), tensor.storage_offset())
        kind = (tensor.requires_grad, type(tensor) is nn.Parameter, is_computed(tensor))
        attached = {} if id(tensor) in self._stripped else dict(vars(tensor))
        memory = self._find(tensor.untyped_storage())
        return _view, (memory, *view, *kind, attached)

    def _find(self, storage: torch.UntypedStorage) -> Memory:
        if storage.nbytes() == 0:
            self._empty.append(Memory(storage))
            return self._empty[-1]
        key = (str(storage.device), storage.data_ptr(), storage.nbytes())
        return self._known.setdefault(key, Memory(storage))


def allocate(device: str, data: Any) -> torch.UntypedStorage:
    """Memory of torch's own, aligned as it aligns it, with the bytes in it."""
    size = memoryview(data).nbytes
    held = torch.empty(size, dtype=torch.uint8, device="cpu")
    if size:
        ctypes.memmove(held.data_ptr(), _address(data), size)
    return held.to(device).untyped_storage()


def _address(data: Any) -> Any:
    view = memoryview(data)
    return bytes(view) if view.readonly else (ctypes.c_char * view.nbytes).from_buffer(view)


def _view(
    storage: torch.UntypedStorage,
    dtype: torch.dtype,
    size: tuple[int, ...],
    stride: tuple[int, ...],
    offset: int,
    requires_grad: bool,
    is_parameter: bool,
    was_computed: bool,
    attached: Mapping[str, Any],
) -> torch.Tensor:
    with torch.no_grad():
        tensor = torch.empty(0, dtype=dtype, device=storage.device)
        tensor.set_(storage, offset, size, stride)
    if is_parameter:
        tensor = nn.Parameter(tensor, requires_grad=requires_grad)
    else:
        tensor.requires_grad_(requires_grad)
    if was_computed:
        tensor = make_computed(tensor)
    vars(tensor).update(attached)
    return tensor


def _is_plain(tensor: torch.Tensor) -> bool:
    return (
        type(tensor) in (torch.Tensor, nn.Parameter)
        and tensor.layout is torch.strided
        and tensor.device.type != "meta"
        and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
    )
