"""Fake tensors: tensors without data, and their moves to a GPU that does not exist."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from shardscope._torch.dispatch import (
    DataDependentOutputException,
    detect_fake_mode,
    has_fake_tensors,
)
from shardscope._torch.logs import FAKE_TENSOR_LOG
from shardscope._torch.private import find_exception, find_name

FakeTensor = find_name("torch._subclasses.fake_tensor.FakeTensor", "recognise tensors without data")
FakeTensorMode = find_name(
    "torch._subclasses.fake_tensor.FakeTensorMode",
    "read DDP's buckets and run ops without allocating data",
)

MAX_CONSTANT = 4096
"""The number of elements up to which a tensor of known values stays readable without data."""

NO_DATA = (
    DataDependentOutputException,
    find_exception(
        "torch._subclasses.fake_tensor.DynamicOutputShapeException",
        "run models that read values on data",
    ),
    find_exception(
        "torch._subclasses.fake_tensor.UnsupportedFakeTensorException",
        "run models that need data on data",
    ),
)
"""Exceptions raised where a program reads values, or sizes that depend on values."""


@contextmanager
def without_data() -> Iterator[None]:
    """Create fake tensors until the context ends, in the active fake tensor mode or a new one."""
    log = logging.getLogger(FAKE_TENSOR_LOG)
    is_disabled, log.disabled = log.disabled, True  # errors of ops are logged as well as raised
    try:
        with nullcontext() if detect_fake_mode() else FakeTensorMode(allow_non_fake_inputs=True):
            yield
    finally:
        log.disabled = is_disabled


def is_fake(tensor: torch.Tensor) -> bool:
    """Whether the tensor has no data."""
    return isinstance(tensor, FakeTensor)


@contextmanager
def moves_within_cpu() -> Iterator[None]:
    """Keep fake tensors on the CPU when they are moved to CUDA.

    Patches methods, because torch queries the GPU before any dispatch mode sees the op.
    """
    to, cuda = torch.Tensor.to, torch.Tensor.cuda

    @functools.wraps(to)
    def move(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if has_fake_tensors((tensor,)):
            args = tuple(map(_to_cpu, args))
            kwargs = {name: _to_cpu(value) for name, value in kwargs.items()}
        return to(tensor, *args, **kwargs)

    @functools.wraps(cuda)
    def move_to_cuda(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return to(tensor, "cpu") if has_fake_tensors((tensor,)) else cuda(tensor, *args, **kwargs)

    torch.Tensor.to, torch.Tensor.cuda = move, move_to_cuda  # type: ignore[assignment]
    try:
        yield
    finally:
        del torch.Tensor.to, torch.Tensor.cuda  # they are inherited


def on_device(kwargs: dict[str, Any], device_type: str) -> dict[str, Any]:
    """The keyword arguments of a factory op, for a tensor on the simulated device.

    A meta tensor is created there too, and, if the CPU stands for the GPU, a tensor on "cuda".
    """
    device = kwargs.get("device")
    is_meta = isinstance(device, torch.device) and device.type == "meta"
    if is_meta or (device_type == "cpu" and _is_cuda(device)):
        kwargs = {**kwargs, "device": torch.device(device_type)}
    return {**kwargs, "pin_memory": False} if kwargs.get("pin_memory") else kwargs


def _is_cuda(value: Any) -> bool:
    if isinstance(value, torch.device):
        return value.type == "cuda"
    return isinstance(value, str) and value.partition(":")[0] == "cuda"


def _to_cpu(value: Any) -> Any:
    return torch.device("cpu") if _is_cuda(value) else value
