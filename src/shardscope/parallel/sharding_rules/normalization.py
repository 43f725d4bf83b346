"""Batch, instance, group, layer and RMS norm."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, fx

from shardscope._torch.dispatch import private_aten_op
from shardscope.parallel.ir.graph import Strategy
from shardscope.parallel.sharding_rules.builders import (
    has_nonempty_shards,
    make_strategy,
    shard_dims,
    shardable_dims,
    to_compute_dtype,
)
from shardscope.parallel.sharding_rules.context import LoweringContext, OpCall
from shardscope.parallel.sharding_rules.registry import decomposition, lowering, rule
from shardscope.plan.placements import Placement, Replicate, Shard, divides, product

aten = torch.ops.aten

_PER_CHANNEL = ("weight", "bias", "running_mean", "running_var")


@rule(
    aten.batch_norm.default,
    aten.native_batch_norm.default,
    private_aten_op("native_batch_norm_legit"),
    private_aten_op("native_batch_norm_legit.no_stats"),
    private_aten_op("native_batch_norm_legit_functional"),
    private_aten_op("native_batch_norm_legit_no_training"),
)
def shard_batch_norm(call: OpCall) -> Iterator[Strategy]:
    """Channels; the other dims too if the batch's own statistics are not used."""
    yield from _shard_channels(call)
    if not _uses_batch_statistics(call):
        yield from _shard_samples(call)


def _uses_batch_statistics(call: OpCall) -> bool:
    has_running_stats = call.arguments.get("running_mean") is not None
    return bool(call.arguments.get("training", False)) or not has_running_stats


def _shard_channels(call: OpCall) -> Iterator[Strategy]:
    """Every rank needs a nonempty shard of channels: torch does not normalize empty tensors."""
    placements = {name: Shard(0) for name in _PER_CHANNEL if name in call.arguments}
    if has_nonempty_shards(call, call.tensor("input").shape[1]):
        yield make_strategy(
            call, {"input": Shard(1), **placements}, _output_placements(call, Shard(1), Shard(0))
        )


def _shard_samples(call: OpCall) -> Iterator[Strategy]:
    for dim in range(call.tensor("input").num_dims):
        if dim != 1 and has_nonempty_shards(call, call.tensor("input").shape[dim]):
            yield make_strategy(
                call, {"input": Shard(dim)}, _output_placements(call, Shard(dim), Replicate())
            )


def _output_placements(call: OpCall, result: Placement, statistics: Placement) -> list[Placement]:
    """Statistics that were not computed are returned empty, and so replicated."""
    statistics_placements = [
        Replicate() if output.shape == (0,) else statistics for output in call.outputs[1:]
    ]
    return [result, *statistics_placements]


@rule(aten.instance_norm.default)
def shard_instance_norm(call: OpCall) -> Iterator[Strategy]:
    """Each sample is normalized separately, but running statistics are updated from the entire
    batch.
    """
    has_running_stats = call["running_mean"] is not None
    if not (has_running_stats and call["use_input_stats"]):
        if has_nonempty_shards(call, call.tensor("input").shape[0]):
            yield make_strategy(call, {"input": Shard(0)}, Shard(0))
        yield from _shard_channels(call)


@decomposition(private_aten_op("native_batch_norm_legit_functional"))
def decompose_batch_norm_functional(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor,
    running_var: Tensor,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Tensor, ...]:
    """Running statistics take the unbiased variance, the result the biased one, as in torch."""
    if not training:
        raise NotImplementedError
    result, mean, variance = _normalize(input, (weight, bias), eps)
    count = _num_samples(input)
    unbiased = variance * (count / max(1, count - 1))
    means = running_mean * (1 - momentum) + mean.to(running_mean.dtype) * momentum
    variances = running_var * (1 - momentum) + unbiased.to(running_var.dtype) * momentum
    return result, mean, torch.rsqrt(variance + eps), means, variances


@decomposition(private_aten_op("native_batch_norm_legit.no_stats"))
def decompose_batch_norm_without_stats(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Tensor, ...]:
    result, mean, variance = _normalize(input, (weight, bias), eps)
    return result, mean, torch.rsqrt(variance + eps)


@decomposition(aten.batch_norm.default)
def decompose_batch_norm(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> Tensor:
    """Only without running statistics, which this op would write to; the functional op handles
    those.
    """
    if running_mean is not None:
        raise NotImplementedError
    return _normalize(input, (weight, bias), eps)[0]


@decomposition(aten.instance_norm.default)
def decompose_instance_norm(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    use_input_stats: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> Tensor:
    if running_mean is not None or not use_input_stats:
        raise NotImplementedError
    result: Tensor = aten.group_norm(input, input.shape[1], weight, bias, eps)
    return result


def _normalize(
    input: Tensor, affine: tuple[Tensor | None, Tensor | None], eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The result, and the batch's mean and variance, which are detached."""
    wide = to_compute_dtype(input)
    dims = [dim for dim in range(input.dim()) if dim != 1]
    count = _num_samples(input)
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
    statistics = [statistic.detach().reshape(-1) for statistic in (mean, variance)]
    return result.to(input.dtype), statistics[0], statistics[1]


def _num_samples(input: Tensor) -> int:
    """The number of elements per channel, from sizes, so that nothing needs to be gathered."""
    return math.prod(size for dim, size in enumerate(input.shape) if dim != 1)


@rule(aten.group_norm.default, aten.native_group_norm.default)
def shard_group_norm(call: OpCall) -> Iterator[Strategy]:
    yield make_strategy(call, {"input": Shard(0)}, Shard(0))
    num_groups = call.arguments.get("num_groups", call.arguments.get("group"))
    # If an earlier axis has sharded the channels, groups may no longer divide them.
    if divides(call.num_ranks, num_groups) and divides(num_groups, call.tensor("input").shape[1]):
        placements = {"input": Shard(1), "weight": Shard(0), "bias": Shard(0)}
        yield make_strategy(call, placements, Shard(1), is_permutation_invariant=False)


@lowering(aten.group_norm.default)
def lower_group_norm(local: LoweringContext) -> fx.Node:
    return local.repeat(num_groups=_num_local_groups(local, local["num_groups"]))


@lowering(aten.native_group_norm.default)
def lower_native_group_norm(local: LoweringContext) -> fx.Node:
    shape, builder = local.outputs[0].local_shape(local.coordinate), local.builder
    return local.repeat(
        N=builder.size(shape[0]),
        C=builder.size(shape[1]),
        HxW=builder.size(product(shape[2:])),
        group=_num_local_groups(local, local["group"]),
    )


def _num_local_groups(local: LoweringContext, num_groups: int) -> int:
    spec = local.input_spec("input")
    local_channels, num_channels = spec.local_shape(local.coordinate)[1], spec.shape[1]
    assert num_groups * local_channels % num_channels == 0, "a rank has to hold complete groups"
    return int(num_groups * local_channels // num_channels)


@decomposition(aten.group_norm.default)
def decompose_group_norm(
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Tensor:
    """Sums over a group's channels and spatial dims, whichever of them are sharded."""
    wide = to_compute_dtype(input)
    groups = wide.reshape(wide.shape[0], num_groups, -1, *wide.shape[2:])
    dims = list(range(2, groups.dim()))
    count = math.prod(groups.shape[2:])
    centred = groups - groups.sum(dims, keepdim=True) / count
    variance = (centred * centred).sum(dims, keepdim=True) / count
    result = (centred * torch.rsqrt(variance + eps)).flatten(1, 2)
    shape = [-1] + [1] * (input.dim() - 2)
    if weight is not None:
        result = result * weight.reshape(shape)
    if bias is not None:
        result = result + bias.reshape(shape)
    return result.to(input.dtype)


@rule(
    *(aten.layer_norm.default, aten.native_layer_norm.default),
    *(aten.rms_norm.default, private_aten_op("fused_rms_norm")),
)
def shard_layer_norm(call: OpCall) -> Iterator[Strategy]:
    """Every dim before the normalized ones, for all outputs; weights are replicated."""
    spec = call.tensor("input")
    first_normalized = spec.num_dims - len(call["normalized_shape"])
    dims = shardable_dims(spec, *range(first_normalized, spec.num_dims))
    yield from shard_dims(call, "input", dims)


@decomposition(aten.layer_norm.default)
def decompose_layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Tensor:
    return decompose_native_layer_norm(input, normalized_shape, weight, bias, eps)[0]


@decomposition(aten.native_layer_norm.default)
def decompose_native_layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    dims = _normalized_dims(input, normalized_shape)
    wide = to_compute_dtype(input)
    mean = wide.mean(dims, keepdim=True)
    centred = wide - mean
    rstd = ((centred * centred).mean(dims, keepdim=True) + eps).rsqrt()
    result = _scale(centred * rstd, weight, bias)
    # On a CPU, torch returns the statistics in the input's dtype.
    statistics_dtype = input.dtype if input.device.type == "cpu" else wide.dtype
    return result.to(input.dtype), mean.to(statistics_dtype), rstd.to(statistics_dtype)


@decomposition(aten.rms_norm.default)
def decompose_rms_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor:
    return decompose_fused_rms_norm(input, normalized_shape, weight, eps)[0]


@decomposition(private_aten_op("fused_rms_norm"))
def decompose_fused_rms_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None, eps: float | None
) -> tuple[Tensor, Tensor]:
    dims = _normalized_dims(input, normalized_shape)
    wide = to_compute_dtype(input)
    # Without an eps, torch takes that of the dtype it computes in.
    epsilon = torch.finfo(wide.dtype).eps if eps is None else eps
    rstd = ((wide * wide).mean(dims, keepdim=True) + epsilon).rsqrt()
    return _scale(wide * rstd, weight, None).to(input.dtype), rstd


def _normalized_dims(input: Tensor, shape: Sequence[int]) -> list[int]:
    return list(range(input.dim() - len(shape), input.dim()))


def _scale(normalized: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    scaled = normalized if weight is None else normalized * weight
    return scaled if bias is None else scaled + bias
