"""What nodes make: the tensors in it, and copies that share no memory with it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch

from shardscope._torch.storages import is_wrapper_type

__all__ = ["copy_tensor", "has_memory", "map_leaves", "map_tensors", "tensors_in"]


def map_leaves(value: Any, kind: type, change: Callable[[Any], Any]) -> Any:
    """The same value with what is of a kind changed; named tuples become plain ones."""
    if isinstance(value, kind):
        return change(value)
    if isinstance(value, torch.Size):
        return value
    if isinstance(value, tuple | list):
        parts = [map_leaves(part, kind, change) for part in value]
        return parts if isinstance(value, list) else tuple(parts)
    if isinstance(value, dict):
        return {key: map_leaves(part, kind, change) for key, part in value.items()}
    if isinstance(value, slice):
        ends = (value.start, value.stop, value.step)
        return slice(*(map_leaves(part, kind, change) for part in ends))
    return value


def map_tensors(value: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """The same value with its tensors changed."""
    return map_leaves(value, torch.Tensor, change)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors of a value, in the order in which `map_tensors` changes them."""
    found: list[torch.Tensor] = []
    map_tensors(value, found.append)
    return iter(found)


def has_memory(tensor: torch.Tensor) -> bool:
    """Whether it is a plain tensor whose bytes can be looked at."""
    is_plain = tensor.layout is torch.strided and not is_wrapper_type(type(tensor))
    return is_plain and not tensor.is_meta and not tensor.is_quantized and not tensor.is_nested


@torch.inference_mode(False)
@torch.no_grad()
def copy_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The same values, sizes and strides, without gradients, in memory of its own."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if not has_memory(tensor):
        return tensor.clone()
    size, stride = tensor.size(), tensor.stride()
    steps = [(one - 1) * step for one, step in zip(size, stride, strict=True)]
    length = 1 + sum(steps) if math.prod(size) else 0
    flat = tensor.as_strided((length,), (1,)).clone()
    copy = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return copy.set_(flat.untyped_storage(), 0, size, stride)
