"""What decompositions share to be as exact as the kernels they stand for."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["Dims", "as_real", "as_wide", "detached_peak", "safe_root"]

Dims = int | Sequence[int] | None


def as_wide(narrow: Tensor) -> Tensor:
    """In the dtype that torch's kernels compute in: halves are widened."""
    is_half = narrow.dtype in (torch.float16, torch.bfloat16)
    return narrow.to(torch.float32) if is_half else narrow


def as_real(magnitude: Tensor, dtype: torch.dtype) -> Tensor:
    """In the dtype that magnitudes of `dtype` have."""
    return magnitude.to(dtype.to_real())


def detached_peak(whole: Tensor, dims: int | list[int]) -> Tensor:
    """The largest value, kept out of autograd.

    It only keeps exp() in range: the result does not depend on it, so neither does its gradient.
    """
    return whole.detach().amax(dims, keepdim=True)


def safe_root(squares: Tensor) -> Tensor:
    """The square root, whose gradient at zero is zero as torch's norms have it, not infinite."""
    is_zero = squares == 0
    return torch.where(is_zero, squares, torch.where(is_zero, 1.0, squares).sqrt())
