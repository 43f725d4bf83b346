"""layer_norm and rms_norm: along leading dims, or taken apart where a normalised dim is cut."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from shardscope._torch.inner_ops import inner_op
from shardscope.parallel.rules.book import decomposition, rule
from shardscope.parallel.rules.call import Call, Strategy
from shardscope.parallel.rules.dims import can_be_cut, cut
from shardscope.parallel.rules.precision import as_wide

__all__ = [
    "layer_norms",
    "take_fused_rms_norm_apart",
    "take_layer_norm_apart",
    "take_native_layer_norm_apart",
    "take_rms_norm_apart",
]

_aten = torch.ops.aten


@rule(
    *(_aten.layer_norm.default, _aten.native_layer_norm.default),
    *(_aten.rms_norm.default, inner_op("fused_rms_norm")),
)
def layer_norms(call: Call) -> Iterator[Strategy]:
    """Every dim before the normalised ones, of all results; weights stay whole."""
    num_leading = call["input"].num_dims - len(call["normalized_shape"])
    for dim in range(num_leading):
        if can_be_cut(call["input"].shape[dim]):
            yield cut(call, {0: dim}, dict.fromkeys(range(len(call.outputs)), dim))


@decomposition(_aten.layer_norm.default)
def take_layer_norm_apart(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Tensor:
    return take_native_layer_norm_apart(input, normalized_shape, weight, bias, eps)[0]


@decomposition(_aten.native_layer_norm.default)
def take_native_layer_norm_apart(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    dims = _normalised(input, normalized_shape)
    wide = as_wide(input)
    mean = wide.mean(dims, keepdim=True)
    left = wide - mean
    rstd = ((left * left).mean(dims, keepdim=True) + eps).rsqrt()
    result = _scale(left * rstd, weight, bias)
    # On a CPU, torch keeps the statistics in the input's dtype.
    kept = input.dtype if input.device.type == "cpu" else wide.dtype
    return result.to(input.dtype), mean.to(kept), rstd.to(kept)


@decomposition(_aten.rms_norm.default)
def take_rms_norm_apart(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor:
    return take_fused_rms_norm_apart(input, normalized_shape, weight, eps)[0]


@decomposition(inner_op("fused_rms_norm"))
def take_fused_rms_norm_apart(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None, eps: float | None
) -> tuple[Tensor, Tensor]:
    dims = _normalised(input, normalized_shape)
    wide = as_wide(input)
    # Without an eps, torch takes the smallest step of the dtype it computes in.
    step = torch.finfo(wide.dtype).eps if eps is None else eps
    rstd = ((wide * wide).mean(dims, keepdim=True) + step).rsqrt()
    return _scale(wide * rstd, weight, None).to(input.dtype), rstd


def _normalised(whole: Tensor, shape: Sequence[int]) -> list[int]:
    return list(range(whole.dim() - len(shape), whole.dim()))


def _scale(normal: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    scaled = normal if weight is None else normal * weight
    return scaled if bias is None else scaled + bias
