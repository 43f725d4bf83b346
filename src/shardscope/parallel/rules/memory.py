"""The order of a tensor's dims in memory, which is the order in which numbers are drawn for it."""

from __future__ import annotations

import sympy
import torch
from torch import Tensor

from shardscope._torch.programs import expression_of

__all__ = ["memory_order"]


def memory_order(tensor: Tensor) -> tuple[int, ...]:
    """Its dims from the slowest to the fastest, as a new tensor like it would have them."""
    strides = [expression_of(one) for one in torch.empty_like(tensor).stride()]
    return tuple(sorted(range(tensor.dim()), key=lambda dim: -_sample(strides[dim])))


def _sample(stride: int | sympy.Expr) -> int:
    """A stride is a product of sizes, so any sizes above one order strides alike."""
    if isinstance(stride, int):
        return stride
    return int(stride.subs(dict.fromkeys(stride.free_symbols, 2)))
