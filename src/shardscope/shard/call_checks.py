"""Whether what `memory()` was given can be used; each refusal says what to give instead."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from shardscope.errors import MemoryProfileError
from shardscope.world import current_world

__all__ = ["check_call", "check_made", "check_needs_no_closure", "checked_size"]

_MAX_BYTES = 1 << 62


def check_call(model: object, step: object, optimizer: object) -> None:
    """Refuse arguments that are not what they should be, and a process group that is real."""
    for one in _models(model):
        if not isinstance(one, nn.Module):
            raise MemoryProfileError(
                f"memory() got {_describe(one)} instead of a module. Give a model, a list of "
                "models or a dict from name to model, or None to follow every module called."
            )
    if not callable(step) or isinstance(step, nn.Module):
        raise MemoryProfileError(
            f"memory() got {_describe(step)} for its step. Give a function without arguments "
            "that runs one: forward and backward, and the optimizer unless that is given."
        )
    _check_optimizer(optimizer)
    if dist.is_initialized() and current_world() is None:
        raise MemoryProfileError(
            f"memory() was called in a real process group ({dist.get_backend()}), to which it "
            "would send tensors without data. Call it in a simulated world, "
            "`with simulate(mesh=…)`, in a process without a process group."
        )


def checked_size(device_bytes: object) -> int | None:
    """What a device has, as a whole number of bytes."""
    if device_bytes is None:
        return None
    size = 0
    if isinstance(device_bytes, float) and device_bytes.is_integer():
        size = int(device_bytes)
    elif hasattr(device_bytes, "__index__") and not isinstance(device_bytes, bool | torch.Tensor):
        size = operator.index(device_bytes)
    if not 0 < size < _MAX_BYTES:
        raise MemoryProfileError(
            f"memory() got device_bytes={device_bytes!r:.60}. Give the memory of the GPU in "
            "bytes, such as 80 << 30."
        )
    return size


def check_made(optimizer: object) -> Optimizer:
    """Refuse what a function made of the model, unless it is an optimizer."""
    if not isinstance(optimizer, Optimizer):
        raise MemoryProfileError(
            f"the function that memory() got for its optimizer returned {_describe(optimizer)}. "
            "Return the optimizer itself, one for all parameters."
        )
    return optimizer


def check_needs_no_closure(optimizer: Optimizer) -> None:
    """Refuse to step an optimizer whose step runs the model itself."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise MemoryProfileError(
            f"{type(optimizer).__name__} was given to memory(), but its step() needs a closure. "
            "Call optimizer.step(closure) in the step itself."
        )


def _check_optimizer(optimizer: object) -> None:
    if isinstance(optimizer, type) and issubclass(optimizer, Optimizer):
        raise MemoryProfileError(
            f"memory() got the class {optimizer.__name__} for its optimizer. Give an optimizer, "
            f"{optimizer.__name__}(model.parameters()), or a function that makes one."
        )
    is_usable = optimizer is None or isinstance(optimizer, Optimizer) or callable(optimizer)
    if is_usable and not isinstance(optimizer, nn.Module):
        return
    several = isinstance(optimizer, Sequence | Mapping)
    raise MemoryProfileError(
        f"memory() got {_describe(optimizer)} for its optimizer. Give an optimizer, or a "
        "function that creates one for the "
        f"model{('; step several in the step' if several else '')}."
    )


def _models(model: object) -> Iterator[object]:
    if isinstance(model, Mapping):
        yield from model.values()
    elif isinstance(model, Sequence) and not isinstance(model, str | bytes):
        yield from model
    elif model is not None:
        yield model


def _describe(value: object) -> str:
    return type(value).__name__
