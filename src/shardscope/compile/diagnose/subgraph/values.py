"""Values of graph nodes: the tensors in them, copies without shared memory, non-leaf tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, final

import torch
from torch import Tensor

from shardscope._torch.storage import is_wrapper_type


def map_leaves(value: Any, kind: type, change: Callable[[Any], Any]) -> Any:
    """The same value with all leaves of type `kind` changed; named tuples become plain tuples."""
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
    tensors: list[torch.Tensor] = []
    map_tensors(value, tensors.append)
    return iter(tensors)


def has_memory(tensor: torch.Tensor) -> bool:
    """Whether it is a dense tensor whose bytes are accessible."""
    is_plain = tensor.layout is torch.strided and not is_wrapper_type(type(tensor))
    return is_plain and not tensor.is_meta and not tensor.is_quantized and not tensor.is_nested


@torch.inference_mode(False)
@torch.no_grad()
def copy_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with equal values, sizes and strides, without gradients, in new memory."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if not has_memory(tensor):
        return tensor.clone()
    size, stride = tensor.size(), tensor.stride()
    steps = [(dim_size - 1) * step for dim_size, step in zip(size, stride, strict=True)]
    length = 1 + sum(steps) if math.prod(size) else 0
    flat = tensor.as_strided((length,), (1,)).clone()
    copy = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return copy.set_(flat.untyped_storage(), 0, size, stride)


def is_computed(tensor: Tensor) -> bool:
    """Whether it is a non-leaf tensor that requires grad."""
    return tensor.requires_grad and not tensor.is_leaf


def make_computed(leaf: Tensor) -> Tensor:
    """A non-leaf tensor with the same memory, which autograd treats as computed from `leaf`."""
    with torch.enable_grad():
        computed: Tensor = _Computed.apply(leaf)  # type: ignore[no-untyped-call]
    return computed


def find_leaf(tensor: Tensor) -> Tensor:
    """The leaf of a tensor from `make_computed`; any other tensor itself."""
    step = tensor.grad_fn
    if step is None or step.name() != f"{_Computed.__name__}Backward":
        return tensor
    ((accumulate, _),) = step.next_functions
    leaf: Tensor = accumulate.variable  # type: ignore[union-attr]
    return leaf


@final
class _Computed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, leaf: Tensor) -> Tensor:
        if not has_memory(leaf):
            return leaf.clone()
        # A view would be marked as one, and could not be written to.
        bare = torch.empty(0, dtype=leaf.dtype, device=leaf.device)
        layout = (leaf.storage_offset(), leaf.size(), leaf.stride())
        return bare.set_(leaf.untyped_storage(), *layout)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0]
