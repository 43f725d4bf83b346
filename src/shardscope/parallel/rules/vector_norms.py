"""Norms and logsumexp in terms of sums, for where a dim they reduce is cut."""

from __future__ import annotations

from math import inf

import torch
from torch import Tensor

from shardscope.parallel.rules.book import decomposition
from shardscope.parallel.rules.dims import wrap_all
from shardscope.parallel.rules.precision import Dims, as_real, as_wide, detached_peak, safe_root

__all__ = [
    "take_cast_norm_along_dims_apart",
    "take_cast_norm_of_all_apart",
    "take_frobenius_norm_apart",
    "take_logsumexp_apart",
    "take_norm_along_dims_apart",
    "take_norm_apart",
    "take_norm_of_all_apart",
]

_aten = torch.ops.aten


@decomposition(_aten.logsumexp.default, _aten.special_logsumexp.default)
def take_logsumexp_apart(self: Tensor, dim: Dims, keepdim: bool = False) -> Tensor:
    dims = wrap_all(dim, self.dim())
    wide = as_wide(self)
    peak = detached_peak(wide, dims)
    # An infinite peak would make a nan of the difference.
    peak = torch.where(peak.abs() == inf, 0.0, peak)
    whole = (wide - peak).exp().sum(dims, keepdim=True).log() + peak
    return (whole if keepdim or not dims else whole.squeeze(dims)).to(self.dtype)


@decomposition(_aten.linalg_vector_norm.default)
def take_norm_apart(
    self: Tensor,
    ord: float = 2,
    dim: Dims = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    cast = self if dtype is None else self.to(dtype)
    found = _norm(as_wide(cast).abs(), ord, wrap_all(dim, self.dim()), keepdim)
    return as_real(found, cast.dtype)


@decomposition(_aten.norm.Scalar)
def take_norm_of_all_apart(self: Tensor, p: float = 2) -> Tensor:
    return take_norm_apart(self, p)


@decomposition(_aten.norm.ScalarOpt_dtype)
def take_cast_norm_of_all_apart(self: Tensor, p: float | None, *, dtype: torch.dtype) -> Tensor:
    return take_norm_apart(self, 2 if p is None else p, dtype=dtype)


@decomposition(_aten.norm.ScalarOpt_dim)
def take_norm_along_dims_apart(
    self: Tensor, p: float | None, dim: Dims, keepdim: bool = False
) -> Tensor:
    return take_norm_apart(self, 2 if p is None else p, dim, keepdim)


@decomposition(_aten.norm.ScalarOpt_dim_dtype)
def take_cast_norm_along_dims_apart(
    self: Tensor, p: float | None, dim: Dims, keepdim: bool, *, dtype: torch.dtype
) -> Tensor:
    return take_norm_apart(self, 2 if p is None else p, dim, keepdim, dtype=dtype)


@decomposition(_aten.frobenius_norm.dim)
def take_frobenius_norm_apart(self: Tensor, dim: Dims, keepdim: bool = False) -> Tensor:
    return take_norm_apart(self, 2, dim, keepdim)


def _norm(magnitudes: Tensor, order: float, dims: list[int], keepdim: bool) -> Tensor:
    if order == inf:
        return magnitudes.amax(dims, keepdim)
    if order == -inf:
        return magnitudes.amin(dims, keepdim)
    if order == 0:
        return (magnitudes != 0).to(magnitudes.dtype).sum(dims, keepdim)
    if order == 1:
        return magnitudes.sum(dims, keepdim)
    if order == 2:
        return safe_root((magnitudes * magnitudes).sum(dims, keepdim))
    return magnitudes.pow(order).sum(dims, keepdim).pow(1 / order)
