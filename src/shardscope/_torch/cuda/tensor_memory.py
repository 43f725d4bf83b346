"""What a tensor without data answers about its memory: its address, its type, whether it is pinned.

What hands its memory to another library (DLPack, `__cuda_array_interface__`) is refused: there is
none, and the library would read from an address that does not exist.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, final

import torch

from shardscope._torch.cuda.runtime import replace_attribute
from shardscope._torch.fake import FakeTensor
from shardscope.errors import WorldError

_PINNED = "shardscope_is_pinned"
_CUDA_TYPE = "torch.cuda."


@final
class _NoInterfaceError(WorldError, AttributeError):
    """An interface to the memory of a GPU: `hasattr` is False."""


def answer_about_memory(stack: ExitStack) -> None:
    """Patch tensors and storages until the stack closes."""
    replace = functools.partial(replace_attribute, stack, torch.Tensor)
    # Copying a tensor reads its data pointer, about which torch warns; programs compare pointers to
    # see which tensors share memory.
    addresses = _Addresses()
    replace_attribute(stack, FakeTensor, "data_ptr", lambda tensor: addresses.find(tensor))
    read_address = torch.UntypedStorage.data_ptr

    def data_ptr(storage: Any) -> int:
        has_data = storage.device.type != "meta"
        return int(read_address(storage)) if has_data else addresses.find_storage(storage)

    replace_attribute(stack, torch.UntypedStorage, "data_ptr", data_ptr)
    replace("pin_memory", lambda tensor, *_, **__: mark_pinned(tensor))
    replace("is_pinned", lambda tensor, *_, **__: getattr(tensor, _PINNED, False))
    replace("record_stream", lambda tensor, stream: None)
    share: Any = torch.Tensor.share_memory_

    @functools.wraps(share)
    def share_memory(tensor: torch.Tensor) -> Any:
        return tensor if isinstance(tensor, FakeTensor) else share(tensor)

    replace("share_memory_", share_memory)
    replace("type", _name_type(torch.Tensor.type))
    replace("__cuda_array_interface__", property(_refuse_interface))
    replace("__dlpack__", _refuse_export("Tensor.__dlpack__", torch.Tensor.__dlpack__))
    for owner in (torch, torch.utils.dlpack):
        for name in ("from_dlpack", "to_dlpack"):
            export = _refuse_export(f"torch.{name}", getattr(owner, name))
            replace_attribute(stack, owner, name, export)


def mark_pinned(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself, which says from now on that its memory is pinned."""
    setattr(tensor, _PINNED, True)
    return tensor


@final
class _Addresses:
    """Addresses for storages without data: storages that are alive do not overlap."""

    def __init__(self) -> None:
        self._next = 1 << 40
        self._known: dict[int, tuple[int, int]] = {}  # size and address, by the C++ object

    def find(self, tensor: torch.Tensor) -> int:
        """The address of a tensor's first element."""
        offset = int(tensor.storage_offset()) * tensor.element_size()
        return self.find_storage(tensor.untyped_storage()) + offset

    def find_storage(self, storage: Any) -> int:
        """The address of a storage's first byte."""
        key, size = storage._cdata, storage.nbytes()
        known_size, address = self._known.get(key, (-1, 0))
        if size > known_size:  # else it is the same storage, or it takes the place of a freed one
            address = self._next
            self._known[key] = (size, address)
            self._next += -(-max(1, size) // 512) * 512
        return address


def _name_type(read: Callable[..., Any]) -> Callable[..., Any]:
    """`Tensor.type`, which also knows `torch.cuda.FloatTensor` and its like."""

    @functools.wraps(read)
    def type_of(tensor: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dtype is None:
            name = str(read(tensor))
            return name.replace("torch.", _CUDA_TYPE, 1) if tensor.is_cuda else name
        if isinstance(dtype, str):
            owner = torch.cuda if dtype.startswith(_CUDA_TYPE) else torch
            dtype = getattr(owner, dtype.rpartition(".")[2])
        if isinstance(dtype, torch.dtype):
            return tensor.to(dtype, *args, **kwargs)
        device = "cuda" if dtype.is_cuda else "cpu"
        if tensor.device.type == device and tensor.dtype == dtype.dtype:
            return tensor
        return tensor.to(device, dtype.dtype, *args, **kwargs)

    return type_of


def _refuse_interface(tensor: torch.Tensor) -> Any:
    raise _NoInterfaceError(
        "Tensor.__cuda_array_interface__ was read in a simulated world on a machine without a GPU, "
        "where tensors have no memory on a device. Leave the other library's kernels out."
    )


def _refuse_export(name: str, export: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(export)
    def refuse_without_data(value: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(value, FakeTensor):
            raise WorldError(
                f"{name}() was called with a tensor without data in a simulated world, which "
                "another library cannot read. Leave the call out, or copy with torch instead."
            )
        return export(value, *args, **kwargs)

    return refuse_without_data
