"""Where the largest value is, and its gradient, for where the dim it is looked for in is cut."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shardscope.parallel.rules.book import decomposition
from shardscope.parallel.rules.dims import wrap, wrap_all
from shardscope.parallel.rules.precision import Dims

__all__: list[str] = []

_aten = torch.ops.aten
_Reduce = Callable[..., Tensor]


def _enter(values: Any, packet: Any, indices: Any, peak: _Reduce) -> None:
    """All ops that look for the same end: amax with max and argmax, amin with min and argmin."""

    @decomposition(values)
    def among_dims(self: Tensor, dim: Dims = (), keepdim: bool = False) -> Tensor:
        return _share(self, wrap_all(dim, self.dim()), keepdim, peak)

    @decomposition(packet.default)
    def among_all(self: Tensor) -> Tensor:
        return _share(self, wrap_all(None, self.dim()), False, peak)

    @decomposition(packet.dim)
    def along_dim(self: Tensor, dim: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:
        """The value is that of the index, which alone has a gradient."""
        candidates, first = _find(self, wrap(dim, self.dim()), peak)
        value = torch.where(candidates == first, self, 0).sum(dim, keepdim).to(self.dtype)
        return value, first if keepdim else first.squeeze(dim)

    @decomposition(indices)
    def index(self: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
        if dim is None:
            first = _find(self.reshape(-1), 0, peak)[1]
            return first.reshape([1] * self.dim() if keepdim else [])
        first = _find(self, wrap(dim, self.dim()), peak)[1]
        return first if keepdim else first.squeeze(dim)


def _share(whole: Tensor, dims: list[int], keepdim: bool, peak: _Reduce) -> Tensor:
    """The largest value as the mean of all that are: so they share its gradient, as in torch."""
    if not whole.is_floating_point():
        return peak(whole, dims, keepdim)
    is_best = _is_best(whole, peak(whole.detach(), dims, True))
    return torch.where(is_best, whole, 0.0).sum(dims, keepdim) / is_best.sum(dims, keepdim)


def _find(whole: Tensor, dim: int, peak: _Reduce) -> tuple[Tensor, Tensor]:
    """The index of each value, if it is the largest, else one past the end; and the first."""
    size = whole.shape[dim]
    indices = torch.arange(size, device=whole.device)
    indices = indices.reshape([-1] + [1] * (whole.dim() - dim - 1))
    is_best = _is_best(whole, peak(whole.detach(), dim, True))
    candidates = torch.where(is_best, indices, size)
    return candidates, candidates.amin(dim, keepdim=True)


def _is_best(whole: Tensor, best: Tensor) -> Tensor:
    """Where the best value is. What is not a number is the best of all, and equals nothing."""
    found = whole == best
    return found | whole.isnan() if whole.is_floating_point() else found


_enter(_aten.amax.default, _aten.max, _aten.argmax.default, torch.amax)
_enter(_aten.amin.default, _aten.min, _aten.argmin.default, torch.amin)
