"""Batch and instance norm: by channels; by batch where statistics are given or need no batch.

Statistics of a batch that is cut are sums over all ranks, which the decomposition spells out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from shardscope._torch.inner_ops import inner_op
from shardscope.parallel.placements import Placement, Replicate, Shard
from shardscope.parallel.rules.book import decomposition, rule
from shardscope.parallel.rules.call import Call, Strategy
from shardscope.parallel.rules.terms import lay, leaves_some

__all__ = [
    "cut_batch_norm",
    "cut_instance_norm",
    "normalize_batch",
    "normalize_batch_and_keep_statistics",
    "normalize_batch_without_history",
    "normalize_instances",
]

aten = torch.ops.aten

_PER_CHANNEL = ("weight", "bias", "running_mean", "running_var")


@rule(
    aten.batch_norm.default,
    aten.native_batch_norm.default,
    inner_op("native_batch_norm_legit"),
    inner_op("native_batch_norm_legit.no_stats"),
    inner_op("native_batch_norm_legit_functional"),
    inner_op("native_batch_norm_legit_no_training"),
)
def cut_batch_norm(call: Call) -> Iterator[Strategy]:
    yield from _cut_channels(call)
    if not _uses_batch(call):
        yield from _cut_samples(call)


def _uses_batch(call: Call) -> bool:
    is_given = call.arguments.get("running_mean") is not None
    return bool(call.arguments.get("training", False)) or not is_given


def _cut_channels(call: Call) -> Iterator[Strategy]:
    """Every rank needs some: torch does not normalize nothing."""
    cuts = {name: Shard(0) for name in _PER_CHANNEL if name in call.arguments}
    if leaves_some(call, call["input"].shape[1]):
        yield lay(call, {"input": Shard(1), **cuts}, _outputs(call, Shard(1), Shard(0)))


def _cut_samples(call: Call) -> Iterator[Strategy]:
    for dim in range(call["input"].num_dims):
        if dim != 1 and leaves_some(call, call["input"].shape[dim]):
            yield lay(call, {"input": Shard(dim)}, _outputs(call, Shard(dim), Replicate()))


def _outputs(call: Call, result: Placement, statistics: Placement) -> list[Placement]:
    """Statistics that were not computed come back empty."""
    rest = [Replicate() if one.shape == (0,) else statistics for one in call.outputs[1:]]
    return [result, *rest]


@rule(aten.instance_norm.default)
def cut_instance_norm(call: Call) -> Iterator[Strategy]:
    """Each sample by itself; but a history of statistics is one of the whole batch."""
    has_history = call["running_mean"] is not None
    if not (has_history and call["use_input_stats"]):
        if leaves_some(call, call["input"].shape[0]):
            yield lay(call, {"input": Shard(0)}, Shard(0))
        yield from _cut_channels(call)


@decomposition(inner_op("native_batch_norm_legit_functional"))
def normalize_batch_and_keep_statistics(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor,
    running_var: Tensor,
    training: bool,
    momentum: float,
    eps: float,
) -> Any:
    """The history takes the variance of a sample, the result that of the batch: as torch has it."""
    if not training:
        raise NotImplementedError
    result, mean, variance = _normalize(input, (weight, bias), eps)
    count = _count_samples(input)
    unbiased = variance * (count / max(1, count - 1))
    means = running_mean * (1 - momentum) + mean.to(running_mean.dtype) * momentum
    variances = running_var * (1 - momentum) + unbiased.to(running_var.dtype) * momentum
    return result, mean, torch.rsqrt(variance + eps), means, variances


@decomposition(inner_op("native_batch_norm_legit.no_stats"))
def normalize_batch_without_history(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> Any:
    result, mean, variance = _normalize(input, (weight, bias), eps)
    return result, mean, torch.rsqrt(variance + eps)


@decomposition(aten.batch_norm.default)
def normalize_batch(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> Any:
    """With a history it would write to it, which only the functional op can be asked to."""
    if running_mean is not None:
        raise NotImplementedError
    return _normalize(input, (weight, bias), eps)[0]


@decomposition(aten.instance_norm.default)
def normalize_instances(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    use_input_stats: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> Any:
    if running_mean is not None or not use_input_stats:
        raise NotImplementedError
    return aten.group_norm(input, input.shape[1], weight, bias, eps)


def _normalize(
    input: Tensor, affine: tuple[Tensor | None, Tensor | None], eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The result, and the batch's mean and variance, which have no gradient of their own."""
    wide = input.float() if input.dtype in (torch.half, torch.bfloat16) else input
    dims = [dim for dim in range(input.dim()) if dim != 1]
    count = _count_samples(input)
    mean = wide.sum(dims, keepdim=True) / count
    centred = wide - mean
    variance = (centred * centred).sum(dims, keepdim=True) / count
    result = centred * torch.rsqrt(variance + eps)
    shape = [-1] + [1] * (input.dim() - 2)
    weight, bias = affine
    if weight is not None:
        result = result * weight.reshape(shape)
    if bias is not None:
        result = result + bias.reshape(shape)
    statistics = [one.detach().reshape(-1) for one in (mean, variance)]
    return result.to(input.dtype), statistics[0], statistics[1]


def _count_samples(input: Tensor) -> int:
    """How many each channel has; from sizes, which need not be gathered to be known."""
    return math.prod(size for dim, size in enumerate(input.shape) if dim != 1)
