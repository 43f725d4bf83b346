"""Softmax and log_softmax: along other dims, or taken apart where their own dim is cut."""

from __future__ import annotations

from collections.abc import Iterator
from math import inf

import torch
from torch import Tensor

from shardscope._torch.inner_ops import inner_op
from shardscope.parallel.rules.book import decomposition, rule
from shardscope.parallel.rules.call import Call, Strategy
from shardscope.parallel.rules.dims import can_be_cut, cut, wrap
from shardscope.parallel.rules.precision import as_wide, detached_peak

__all__ = [
    "softmaxes",
    "take_kernel_log_softmax_apart",
    "take_kernel_softmax_apart",
    "take_log_softmax_apart",
    "take_safe_softmax_apart",
    "take_softmax_apart",
    "take_special_log_softmax_apart",
]

_aten = torch.ops.aten


@rule(
    *(_aten.softmax.int, _aten.log_softmax.int, inner_op("softmax"), inner_op("log_softmax")),
    *(
        _aten.special_softmax.default,
        _aten.special_log_softmax.default,
        inner_op("safe_softmax"),
    ),
)
def softmaxes(call: Call) -> Iterator[Strategy]:
    own = call.inputs[0]
    for dim, size in enumerate(own.shape):
        if dim != wrap(call["dim"], own.num_dims) and can_be_cut(size):
            yield cut(call, {0: dim}, {0: dim})


@decomposition(_aten.softmax.int, _aten.special_softmax.default)
def take_softmax_apart(self: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    whole = self if dtype is None else self.to(dtype)
    wide = as_wide(whole)
    powers = (wide - detached_peak(wide, dim)).exp()
    return (powers / powers.sum(dim, keepdim=True)).to(whole.dtype)


@decomposition(inner_op("safe_softmax"))
def take_safe_softmax_apart(self: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """Where everything is masked, nothing is attended to."""
    is_masked = (self == -inf).all(dim, keepdim=True)
    shares = take_softmax_apart(torch.where(is_masked, 0.0, self), dim, dtype)
    return torch.where(is_masked, 0.0, shares)


@decomposition(_aten.log_softmax.int)
def take_log_softmax_apart(self: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    whole = self if dtype is None else self.to(dtype)
    wide = as_wide(whole)
    shifted = wide - detached_peak(wide, dim)
    return (shifted - shifted.exp().sum(dim, keepdim=True).log()).to(whole.dtype)


@decomposition(_aten.special_log_softmax.default)
def take_special_log_softmax_apart(
    self: Tensor, dim: int, *, dtype: torch.dtype | None = None
) -> Tensor:
    return take_log_softmax_apart(self, dim, dtype)


@decomposition(inner_op("softmax"))
def take_kernel_softmax_apart(self: Tensor, dim: int, half_to_float: bool) -> Tensor:
    return take_softmax_apart(self, dim, torch.float32 if half_to_float else None)


@decomposition(inner_op("log_softmax"))
def take_kernel_log_softmax_apart(self: Tensor, dim: int, half_to_float: bool) -> Tensor:
    return take_log_softmax_apart(self, dim, torch.float32 if half_to_float else None)
