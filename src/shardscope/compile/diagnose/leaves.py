"""Tensors that autograd computed, taken out of their graph and still no leaves.

Compilers may treat leaves of autograd's graph and what was computed from them differently, and only
the latter may be written to in place. A copy of a program's input has to be of the same kind.
"""

from __future__ import annotations

from typing import Any, final

import torch
from torch import Tensor

from shardscope.compile.diagnose.cutting.values import has_memory

__all__ = ["find_leaf", "is_computed", "make_computed"]


def is_computed(tensor: Tensor) -> bool:
    """Whether autograd computed it from something: it asks for gradients and is no leaf."""
    return tensor.requires_grad and not tensor.is_leaf


def make_computed(leaf: Tensor) -> Tensor:
    """A tensor with the same memory that autograd takes for computed from `leaf`."""
    with torch.enable_grad():
        computed: Tensor = _Computed.apply(leaf)  # type: ignore[no-untyped-call]
    return computed


def find_leaf(tensor: Tensor) -> Tensor:
    """The leaf that `make_computed` was given, or any other tensor itself."""
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
        # A view would remember that it is one, and refuse to be written to.
        bare = torch.empty(0, dtype=leaf.dtype, device=leaf.device)
        place = (leaf.storage_offset(), leaf.size(), leaf.stride())
        return bare.set_(leaf.untyped_storage(), *place)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0]
