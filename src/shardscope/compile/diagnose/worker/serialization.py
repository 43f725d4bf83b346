"""Serializes objects for another process: code that it cannot import, tensors and operators."""

from __future__ import annotations

import ctypes
import functools
import io
import pickle
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any, final

import cloudpickle
import torch
from torch import nn

from shardscope._torch.dispatch import (
    CustomOp,
    describe_custom_op,
    disable_dispatch_modes,
    find_operator,
    is_custom_op,
    is_operator,
    name_operator,
    register_custom_op,
    registered_at,
)
from shardscope.compile.diagnose.subgraph import Subgraph, is_non_leaf, make_non_leaf
from shardscope.compile.diagnose.worker.by_value import ByValue, is_importable, reduce_code
from shardscope.compile.diagnose.worker.graphs import build_subgraph, describe_subgraph
from shardscope.errors import CompileError


@final
@dataclass(frozen=True, eq=False)
class StorageReference:
    """A storage; tensors that share it refer to the same object."""

    storage: torch.UntypedStorage

    @property
    def device(self) -> str:
        """The device of the storage."""
        return str(self.storage.device)

    def buffer(self) -> pickle.PickleBuffer:
        """Its bytes: the memory itself if the CPU can read it, otherwise a copy."""
        size = self.storage.nbytes()
        if size == 0:
            return pickle.PickleBuffer(b"")
        if self.storage.device.type != "cpu":
            copy: Any = self.storage.cpu()  # type: ignore[no-untyped-call]
            return pickle.PickleBuffer(ctypes.string_at(copy.data_ptr(), size))
        array = ctypes.c_char * size
        return pickle.PickleBuffer(array.from_address(self.storage.data_ptr()))


@final
class StorageTable:
    """All storages of a message, each listed once."""

    def __init__(self) -> None:
        self._references: dict[tuple[str, int, int], StorageReference] = {}
        self._empty: list[StorageReference] = []  # without an address, so never shared
        self._stripped: dict[int, torch.Tensor] = {}

    def strip(self, values: Iterable[object]) -> None:
        """Leave out attributes that Python code has added to these tensors."""
        tensors = (value for value in values if isinstance(value, torch.Tensor))
        self._stripped.update((id(tensor), tensor) for tensor in tensors)

    def reduce(self, tensor: torch.Tensor) -> Any:
        """The pickle reduction of a dense tensor; NotImplemented for all others."""
        if not _is_plain(tensor):
            return NotImplemented
        view = (tensor.dtype, tensor.size(), tensor.stride(), tensor.storage_offset())
        kind = (tensor.requires_grad, type(tensor) is nn.Parameter, is_non_leaf(tensor))
        attached = {} if id(tensor) in self._stripped else dict(vars(tensor))
        memory = self._find(tensor.untyped_storage())
        return _view, (memory, *view, *kind, attached)

    def _find(self, storage: torch.UntypedStorage) -> StorageReference:
        if storage.nbytes() == 0:
            self._empty.append(StorageReference(storage))
            return self._empty[-1]
        key = (str(storage.device), storage.data_ptr(), storage.nbytes())
        return self._references.setdefault(key, StorageReference(storage))


def allocate(device: str, data: Any) -> torch.UntypedStorage:
    """A new storage of torch, with torch's alignment, that contains these bytes."""
    size = memoryview(data).nbytes
    tensor = torch.empty(size, dtype=torch.uint8, device="cpu")
    if size:
        ctypes.memmove(tensor.data_ptr(), _address(data), size)
    return tensor.to(device).untyped_storage()


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
    was_non_leaf: bool,
    attached: Mapping[str, Any],
) -> torch.Tensor:
    with torch.no_grad():
        tensor = torch.empty(0, dtype=dtype, device=storage.device)
        tensor.set_(storage, offset, size, stride)
    if is_parameter:
        tensor = nn.Parameter(tensor, requires_grad=requires_grad)
    else:
        tensor.requires_grad_(requires_grad)
    if was_non_leaf:
        tensor = make_non_leaf(tensor)
    vars(tensor).update(attached)
    return tensor


def _is_plain(tensor: torch.Tensor) -> bool:
    return (
        type(tensor) in (torch.Tensor, nn.Parameter)
        and tensor.layout is torch.strided
        and tensor.device.type != "meta"
        and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
    )


_TORCH_NAMESPACES = ("aten", "prim", "prims", "higher_order")


@final
@dataclass(frozen=True)
class OperatorData:
    """The names of an op, and what to import, load or define if they do not resolve."""

    names: tuple[str, ...]
    module: str = ""  # to import
    libraries: tuple[str, ...] = ()  # to load
    definition: CustomOp | None = None


def describe_operator(operator: Any) -> OperatorData:
    """An op as data; raises CompileError if only this process has it."""
    names = name_operator(operator)
    namespace, name = names[:2]
    if namespace == "higher_order":
        return OperatorData(names, module=type(operator).__module__)
    if namespace in _TORCH_NAMESPACES:
        return OperatorData(names)
    if definition := describe_custom_op(f"{namespace}::{name}"):
        return OperatorData(names, definition=definition)
    file = registered_at(namespace, name)
    libraries = tuple(sorted(torch.ops.loaded_libraries))
    module = _find_module(file, f"{namespace}::{name}") if file.endswith(".py") else ""
    return OperatorData(names, module=module, libraries=libraries)


def build_operator(data: OperatorData) -> Any:
    """The op of this process with these names."""
    operator = find_operator(data.names)
    if operator is not None:
        return operator
    for library in data.libraries:
        torch.ops.load_library(library)  # type: ignore[no-untyped-call]
    if data.definition is not None:
        register_custom_op(data.definition)
    operator = find_operator(data.names, module=data.module)
    if operator is None:
        raise CompileError(
            f"the op {'.'.join(data.names)} exists in your process only: the worker found no "
            f"definition of it. Define it with torch.library.custom_op, or load its library with "
            f"torch.ops.load_library."
        )
    return operator


def name_function(function: FunctionType) -> tuple[str, str] | None:
    """The namespace and name of a torch function whose `__module__` or `__qualname__` is wrong."""
    if not (function.__module__ or "").startswith("torch"):
        return None
    location = _relocated_functions().get(id(function))
    return location if location is not None and find_function(*location) is function else None


def find_function(namespace: str, name: str) -> Any:
    """The function at the location from `name_function`."""
    return getattr(_namespaces()[namespace], name, None)


def _namespaces() -> dict[str, Any]:
    return {
        "torch": torch,
        "torch.nn.functional": torch.nn.functional,
        "torch.functional": torch.functional,
        "torch.Tensor": torch.Tensor,
    }


@functools.cache
def _relocated_functions() -> dict[int, tuple[str, str]]:
    return {
        id(value): (namespace, name)
        for namespace, owner in _namespaces().items()
        for name, value in vars(owner).items()
        if isinstance(value, FunctionType) and not _is_where_named(value)
    }


def _is_where_named(function: FunctionType) -> bool:
    value: Any = sys.modules.get(function.__module__)
    for name in function.__qualname__.split("."):
        value = getattr(value, name, None)
    return value is function


def _find_module(file: str, op: str) -> str:
    """The importable module of a file."""
    for name, module in list(sys.modules.items()):
        if getattr(module, "__file__", None) == file and is_importable(name):
            return name
    raise CompileError(
        f"the op {op} is registered in {file}, which the worker cannot import. Move it to a module "
        f"of its own, or define it with torch.library.custom_op."
    )


@final
@dataclass(frozen=True)
class Payload:
    """The pickled object, followed by the memory of its tensors, which is not copied."""

    buffers: Sequence[Any]
    storages: StorageTable  # the memory must stay alive until it is sent

    def copy(self) -> Payload:
        """A payload that does not change with the tensors."""
        return Payload([bytes(buffer) for buffer in self.buffers], StorageTable())


def pack(value: object) -> Payload:
    """Pickle a value for another process."""
    file, buffers = io.BytesIO(), list[pickle.PickleBuffer]()
    with ByValue(is_importable) as by_value:
        pickler = _Pickler(file, buffers, by_value)
        pickler.dump(value)
    # Not getbuffer(): Python 3.12.1 crashes when a BytesIO with a view of it is garbage in a cycle.
    return Payload([file.getvalue(), *buffers], pickler.storages)


def unpack(buffers: Sequence[Any]) -> Any:
    """The value that was packed; its tensors are plain, regardless of active dispatch modes."""
    with disable_dispatch_modes(), torch.inference_mode(False):
        return pickle.loads(buffers[0], buffers=buffers[1:])


def encode_subgraph(subgraph: Subgraph) -> bytes:
    """A subgraph as bytes, for files."""
    return pickle.dumps(pack(subgraph).copy().buffers, protocol=5)


def decode_subgraph(data: bytes) -> Subgraph:
    """The subgraph that was encoded."""
    subgraph = unpack(pickle.loads(data))
    assert isinstance(subgraph, Subgraph)
    return subgraph


@final
class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # it has no annotations
    """cloudpickle, with reductions for tensors, operators and subgraphs."""

    def __init__(
        self, file: io.BytesIO, buffers: list[pickle.PickleBuffer], by_value: ByValue
    ) -> None:
        super().__init__(file, protocol=5, buffer_callback=buffers.append)
        self.storages = StorageTable()
        self._by_value = by_value

    def reducer_override(self, value: Any) -> Any:
        """The reduction of `value`; `NotImplemented` leaves it to pickle."""
        if isinstance(value, torch.Tensor):
            return self.storages.reduce(value)
        if type(value).__module__ == "numpy" and type(value).__name__ == "ndarray":
            return value.__reduce__()  # arrays from buffers would be read-only
        if isinstance(value, StorageReference):
            return allocate, (value.device, value.buffer())
        if isinstance(value, Subgraph):
            self.storages.strip(value.inputs)
            return build_subgraph, (describe_subgraph(value),)
        if is_operator(value):
            return build_operator, (describe_operator(value),)
        if is_custom_op(value):
            return register_custom_op, (describe_custom_op(value),)
        return self._reduce_code(value)

    def _reduce_code(self, value: Any) -> Any:
        if isinstance(value, FunctionType) and (location := name_function(value)):
            return find_function, location
        if (reduced := reduce_code(self, value, self._by_value)) is not None:
            return reduced
        return super().reducer_override(value)
