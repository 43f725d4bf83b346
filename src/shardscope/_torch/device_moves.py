"""Moves to a GPU that is not there: tensors without data are the GPU's already.

A training step says `batch.cuda()` or `device="cuda"`; without this it could be told only on a
machine with a GPU.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from shardscope._torch.dispatch import has_fakes

__all__ = ["moves_within_cpu", "on_device"]


@contextmanager
def moves_within_cpu() -> Iterator[None]:
    """Let tensors without data stay here when they are told to go to CUDA.

    Methods, because torch asks the GPU which one it is before any mode sees the op.
    """
    to, cuda = torch.Tensor.to, torch.Tensor.cuda

    @functools.wraps(to)
    def move(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if has_fakes((tensor,)):
            args = tuple(map(_here, args))
            kwargs = {name: _here(value) for name, value in kwargs.items()}
        return to(tensor, *args, **kwargs)

    @functools.wraps(cuda)
    def move_to_cuda(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return to(tensor, "cpu") if has_fakes((tensor,)) else cuda(tensor, *args, **kwargs)

    torch.Tensor.to, torch.Tensor.cuda = move, move_to_cuda  # type: ignore[assignment]
    try:
        yield
    finally:
        del torch.Tensor.to, torch.Tensor.cuda  # they are inherited


def on_device(kwargs: dict[str, Any], device_type: str) -> dict[str, Any]:
    """The arguments of an op that makes a tensor, for one on the device that is simulated.

    A tensor on meta is made there too, and if the host stands for the GPU, one on "cuda".
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


def _here(value: Any) -> Any:
    return torch.device("cpu") if _is_cuda(value) else value
