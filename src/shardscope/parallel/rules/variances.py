"""Variances and deviations in terms of means and sums, for where a dim they reduce is cut."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shardscope.parallel.rules.book import decomposition
from shardscope.parallel.rules.dims import wrap_all
from shardscope.parallel.rules.precision import Dims, as_real, as_wide, safe_root

__all__: list[str] = []

_aten = torch.ops.aten


def _var_mean(
    self: Tensor, dim: Dims = None, *, correction: float | None = None, keepdim: bool = False
) -> tuple[Tensor, Tensor]:
    var, mean = _moments(self, dim, correction, keepdim)
    return as_real(var, self.dtype), mean.to(self.dtype)


def _std_mean(
    self: Tensor, dim: Dims = None, *, correction: float | None = None, keepdim: bool = False
) -> tuple[Tensor, Tensor]:
    var, mean = _moments(self, dim, correction, keepdim)
    return as_real(safe_root(var), self.dtype), mean.to(self.dtype)


def _var(
    self: Tensor, dim: Dims = None, *, correction: float | None = None, keepdim: bool = False
) -> Tensor:
    return _var_mean(self, dim, correction=correction, keepdim=keepdim)[0]


def _std(
    self: Tensor, dim: Dims = None, *, correction: float | None = None, keepdim: bool = False
) -> Tensor:
    return _std_mean(self, dim, correction=correction, keepdim=keepdim)[0]


def _moments(
    whole: Tensor, dim: Dims, correction: float | None, keepdim: bool
) -> tuple[Tensor, Tensor]:
    """The mean of squares of what the mean leaves: stable, unlike a difference of squares."""
    dims = wrap_all(dim, whole.dim())
    wide = as_wide(whole)
    mean = wide.mean(dims, keepdim=True)
    left = wide - mean
    squares = (left * left.conj()).real if left.is_complex() else left * left
    number = _count(whole, dims) - (1 if correction is None else correction)
    number = torch.sym_max(number, 0)  # type: ignore[no-untyped-call]
    var = squares.sum(dims, keepdim=keepdim) / number
    return var, mean if keepdim or not dims else mean.squeeze(dims)


def _count(whole: Tensor, dims: list[int]) -> Any:
    count = 1
    for dim in dims:
        count = count * whole.shape[dim]
    return count


def _enter(packet: Any, apart: Callable[..., Any]) -> None:
    """All three spellings of a statistic."""

    @decomposition(packet.default)
    def of_all(self: Tensor, unbiased: bool = True) -> Any:
        return apart(self, correction=int(unbiased))

    @decomposition(packet.dim)
    def along_dims(self: Tensor, dim: Dims, unbiased: bool = True, keepdim: bool = False) -> Any:
        return apart(self, dim, correction=int(unbiased), keepdim=keepdim)

    decomposition(packet.correction)(apart)


_enter(_aten.var_mean, _var_mean)
_enter(_aten.std_mean, _std_mean)
_enter(_aten.var, _var)
_enter(_aten.std, _std)
