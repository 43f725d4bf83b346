"""Helpers with which decompositions are as precise as the kernels they replace."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

Dims = int | Sequence[int] | None


def to_compute_dtype(tensor: Tensor) -> Tensor:
    """Cast to the dtype that torch's kernels compute in: float32 for half precision."""
    is_half = tensor.dtype in (torch.float16, torch.bfloat16)
    return tensor.to(torch.float32) if is_half else tensor


def to_real_dtype(magnitude: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast to the real dtype that magnitudes of `dtype` have."""
    return magnitude.to(dtype.to_real())


def detached_max(tensor: Tensor, dims: int | list[int]) -> Tensor:
    """The maximum, detached from autograd.

    It only keeps exp() in range: neither the result nor its gradient depends on it.
    """
    return tensor.detach().amax(dims, keepdim=True)


def safe_sqrt(squares: Tensor) -> Tensor:
    """The square root with a gradient of zero at zero, as torch's norms have, instead
    of infinity.
    """
    is_zero = squares == 0
    return torch.where(is_zero, squares, torch.where(is_zero, 1.0, squares).sqrt())
