"""Symmetric memory in a simulated world: buffers, handles and kernels that move no data."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, NoReturn, final

import torch
import torch.distributed as dist
from torch.library import Library

from shardscope._torch.collectives.schema import process_group, registered_ops
from shardscope._torch.cuda.runtime import is_simulated, replace_attribute
from shardscope._torch.private import find_name, is_missing
from shardscope._torch.process_groups.simulated import has_kernel
from shardscope.errors import WorldError

_NEED = "simulate symmetric memory"
_module = find_name("torch.distributed._symmetric_memory", _NEED)
_c10d = find_name("torch._C._distributed_c10d", _NEED)
_KEYS = ("Meta", "CompositeExplicitAutograd", "CompositeImplicitAutograd")
_ADDRESSES = (
    "boxed",
    "buffer_ptrs",
    "buffer_ptrs_dev",
    "get_multimem_cft_handle",
    "get_peer_cft_handle",
    "signal_pad_ptrs",
    "signal_pad_ptrs_dev",
)
_POOL = object()
_GROUP_NAME = "symmetric_memory_group"


@contextmanager
def simulated_symmetric_memory() -> Iterator[None]:
    """Answer symmetric memory's ops on fake tensors and, on simulated GPUs, its buffers."""
    with ExitStack() as stack:
        stack.enter_context(_ops_on_fake_tensors())
        if is_simulated() and not is_missing(_module) and not is_missing(_c10d):
            for owner in (_module, _c10d):
                replace_attribute(stack, owner, "_SymmetricMemory", SymmetricBuffer)
            replace_attribute(stack, _module, "get_mem_pool", lambda device: _POOL)
            use_pool = _use_pool(torch.cuda.use_mem_pool)
            replace_attribute(stack, torch.cuda, "use_mem_pool", use_pool)
            replace_attribute(stack, _module, "_group_name_to_workspace_tensor", {})
            replace_attribute(stack, SymmetricBuffer, "backend", "CUDA")
        yield


def _use_pool(refuse: Any) -> Callable[..., AbstractContextManager[None]]:
    def use_mem_pool(pool: object, *args: Any, **kwargs: Any) -> AbstractContextManager[None]:
        if pool is not _POOL:
            refuse(pool, *args, **kwargs)
        return nullcontext()

    if hasattr(refuse, "__wrapped__"):  # which dynamo reads of context managers
        vars(use_mem_pool)["__wrapped__"] = refuse.__wrapped__
    return use_mem_pool


@contextmanager
def _ops_on_fake_tensors() -> Iterator[None]:
    """Register kernels that compute nothing for the ops that have none for fake tensors."""
    library = Library("symm_mem", "IMPL")
    destroy = library._destroy
    try:
        for name in registered_ops("symm_mem"):
            schema = getattr(torch.ops.symm_mem, name).default._schema
            if not any(has_kernel(f"symm_mem::{name}", key) for key in _KEYS):
                library.impl(name, _make_kernel(schema), "Meta")
        yield
    finally:
        destroy()


def _make_kernel(schema: Any) -> Callable[..., Any]:
    """A kernel that returns the argument that the schema says is returned, or a tensor like it."""
    tensors = [
        index for index, argument in enumerate(schema.arguments) if str(argument.type) == "Tensor"
    ]
    is_returned = schema.returns[0].alias_info if schema.returns else None
    aliased = [
        index
        for index in tensors
        if is_returned is not None
        and (alias := schema.arguments[index].alias_info) is not None
        and alias.before_set == is_returned.before_set
    ]

    def compute(*args: Any) -> Any:
        if not schema.returns:
            return None
        return args[aliased[0]] if aliased else torch.empty_like(args[tensors[0]])

    return compute


@final
class SymmetricBuffer:
    """Stands in for torch's handle of a buffer that all ranks of a group have, and for its class.

    Buffers of peers are views of this rank's: they have the right shape and no data.
    """

    backend = "CUDA"
    signal_pad_size = 2048  # torch's default
    multicast_ptr = 1  # GPUs of a host have multicast; no kernel runs that would use the address

    def __init__(self, tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
        self.rank, self.world_size = group.rank(), group.size()
        self.device = tensor.device
        self.buffer_size = tensor.nbytes
        self.offset = 0
        self._bytes = tensor.detach().reshape(-1).view(torch.uint8)

    @staticmethod
    def empty_strided_p2p(
        size: Sequence[int],
        stride: Sequence[int],
        dtype: torch.dtype,
        device: torch.device | int,
        group_name: str | None = None,
        alloc_id: int | None = None,
    ) -> torch.Tensor:
        """A buffer, which is a tensor like any other."""
        on_device = torch.device("cuda", device) if isinstance(device, int) else device
        tensor = torch.empty_strided(size, stride, dtype=dtype, device=on_device)
        setattr(tensor, _GROUP_NAME, group_name)  # for a rendezvous that names no group
        return tensor

    @classmethod
    def rendezvous(cls, tensor: torch.Tensor, group_name: str | None = None) -> SymmetricBuffer:
        """The handle of a buffer; other ranks are assumed to have the same."""
        name = group_name or getattr(tensor, _GROUP_NAME, None)
        group = dist.group.WORLD if name is None else process_group(name)
        assert group is not None
        return cls(tensor, group)

    @staticmethod
    def has_multicast_support(device_type: Any, device_index: int) -> bool:
        """GPUs of a host have multicast."""
        return True

    @classmethod
    def set_backend(cls, name: str) -> None:
        """Choose the backend; all are simulated in the same way."""
        cls.backend = name

    @classmethod
    def get_backend(cls, device: Any) -> str:
        """The backend that the program chose, or torch's default."""
        return cls.backend

    @staticmethod
    def set_group_info(*_: Any) -> None:
        """Nothing is exchanged."""

    @staticmethod
    def is_symm_mem_tensor(tensor: torch.Tensor) -> bool:
        """Any tensor can be exchanged in a simulated world."""
        return tensor.device.type == "cuda"

    def get_buffer(
        self, rank: int, sizes: Sequence[int], dtype: torch.dtype, storage_offset: int = 0
    ) -> torch.Tensor:
        """A part of the buffer of any rank."""
        start, num_bytes = storage_offset * dtype.itemsize, math.prod(sizes) * dtype.itemsize
        if start + num_bytes > self.buffer_size:
            raise WorldError(
                f"get_buffer() was called for {num_bytes:,} bytes at byte {start:,} of a "
                f"symmetric-memory buffer of {self.buffer_size:,} bytes. Ask for a part of it."
            )
        return self._bytes[start : start + num_bytes].view(dtype).view(tuple(sizes))

    def get_remote_tensor(
        self, peer: int, sizes: Sequence[int], dtype: torch.dtype
    ) -> torch.Tensor:
        """The buffer of a peer."""
        return self.get_buffer(peer, sizes, dtype)

    def get_signal_pad(
        self,
        rank: int,
        sizes: Sequence[int] = (),
        dtype: torch.dtype | None = None,
        storage_offset: int = 0,
    ) -> torch.Tensor:
        """The signal pad of a rank."""
        dtype = dtype or torch.uint32
        shape = tuple(sizes) or (self.signal_pad_size // dtype.itemsize,)
        return torch.empty(shape, dtype=dtype, device=self.device)

    def barrier(self, channel: int = 0, timeout_ms: int = 0) -> None:
        """Wait for no one."""

    def put_signal(self, dst_rank: int, channel: int = 0, timeout_ms: int = 0) -> None:
        """Send nothing."""

    def wait_signal(self, src_rank: int, channel: int = 0, timeout_ms: int = 0) -> None:
        """Wait for no one."""

    @staticmethod
    def stream_write_value32(*_: Any) -> None:
        """Write nothing."""

    @staticmethod
    def memset32(tensor: torch.Tensor, *_: Any) -> torch.Tensor:
        """Write nothing."""
        return tensor

    def __getattr__(self, name: str) -> NoReturn:
        if name not in _ADDRESSES:
            raise AttributeError(f"a symmetric-memory buffer has no attribute {name!r}")
        raise WorldError(
            f"{name} of a symmetric-memory buffer was used in a simulated world, where the buffer "
            "has no address: neither kernels of the program's own nor one-sided transfers by NCCL "
            "run here. Use the collectives of torch.ops.symm_mem, or run on GPUs."
        )
