"""Convolutions, pooling and resizing."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, fx

from shardscope._torch.dispatch import OpOverload, private_aten_op
from shardscope.parallel.ir.graph import Strategy
from shardscope.parallel.sharding_rules.builders import (
    has_nonempty_shards,
    make_strategy,
    propagate_partial_sum,
    shard_dims,
)
from shardscope.parallel.sharding_rules.context import LoweringContext, OpCall, TensorSpec
from shardscope.parallel.sharding_rules.registry import DECOMPOSITIONS, lowering, rule
from shardscope.plan.placements import Partial, Shard, divides

aten = torch.ops.aten

_TRANSPOSED = (
    aten.conv_transpose1d.default,
    aten.conv_transpose2d.input,
    aten.conv_transpose3d.input,
)
_CONVOLUTIONS = (
    aten.conv1d.default,
    aten.conv1d.padding,
    aten.conv2d.default,
    aten.conv2d.padding,
    aten.conv3d.default,
    aten.conv3d.padding,
    aten.convolution.default,
    *_TRANSPOSED,
)


@rule(*_CONVOLUTIONS)
def shard_convolution(call: OpCall) -> Iterator[Strategy]:
    """The batch, and channels or groups of channels. Spatial dims are not sharded: that would need
    an exchange of halos.
    """
    has_batch = call.tensor("input").num_dims == call.tensor("weight").num_dims
    channels = Shard(int(has_batch))
    if has_batch:
        yield make_strategy(call, {"input": Shard(0)}, Shard(0))
    if _num_groups(call) == 1:
        yield from _shard_channels(call, channels)
    else:
        yield from _shard_groups(call, channels)
    if call["bias"] is None:
        yield make_strategy(call, {"input": Partial()}, Partial())
        yield make_strategy(call, {"weight": Partial()}, Partial())


def _shard_channels(call: OpCall, channels: Shard) -> Iterator[Strategy]:
    """Shard the output channels, or (without a bias) the input channels, which gives
    partial sums.
    """
    in_dim, out_dim = (0, 1) if _is_transposed(call) else (1, 0)
    if has_nonempty_shards(call, call.outputs[0].shape[channels.dim]):
        yield make_strategy(call, {"weight": Shard(out_dim), "bias": Shard(0)}, channels)
    if call["bias"] is None and has_nonempty_shards(call, call.tensor("input").shape[channels.dim]):
        yield make_strategy(call, {"input": channels, "weight": Shard(in_dim)}, Partial())


def _shard_groups(call: OpCall, channels: Shard) -> Iterator[Strategy]:
    """Each rank gets complete groups: of the input's channels, of the kernels and of the output's
    channels.
    """
    if divides(call.num_ranks, _num_groups(call)):
        placements = {"input": channels, "weight": Shard(0), "bias": Shard(0)}
        yield make_strategy(call, placements, channels, is_permutation_invariant=False)


def _is_transposed(call: OpCall) -> bool:
    return call.op in _TRANSPOSED or bool(call.arguments.get("transposed"))


def _num_groups(call: OpCall) -> int:
    """Computed from sizes, because an earlier axis may have sharded the groups."""
    channel_dim = int(call.tensor("input").num_dims == call.tensor("weight").num_dims)
    grouped_spec = call.outputs[0] if _is_transposed(call) else call.tensor("input")
    return int(grouped_spec.shape[channel_dim] // call.tensor("weight").shape[1])


@lowering(*_CONVOLUTIONS)
def lower_convolution(local: LoweringContext) -> fx.Node:
    """The op with the rank's own number of groups, where groups are sharded."""
    input_spec, weight_spec = local.input_spec("input"), local.input_spec("weight")
    channel_dim = int(len(input_spec.shape) == len(weight_spec.shape))
    grouped_spec = local.outputs[0] if _is_transposed(local.call) else input_spec
    num_channels = grouped_spec.local_shape(local.coordinate)[channel_dim]
    per_group = weight_spec.local_shape(local.coordinate)[1]
    assert num_channels % per_group == 0, "a rank has to hold complete groups"
    return local.repeat(groups=num_channels // per_group)


def _decompose_bias(op: OpOverload) -> Callable[..., Tensor]:
    """The op without its bias, which is added after the sum over the input's channels."""

    def convolve(
        input: Tensor, weight: Tensor, bias: Tensor | None = None, *args: object, **kwargs: object
    ) -> Tensor:
        if bias is None:
            raise NotImplementedError
        num_spatial_dims = weight.dim() - 2
        product: Tensor = op(input, weight, None, *args, **kwargs)
        return product + bias.reshape(-1, *[1] * num_spatial_dims)

    return convolve


DECOMPOSITIONS.update({op: _decompose_bias(op) for op in _CONVOLUTIONS})


_MAX_POOLS = {
    1: (
        aten.max_pool1d.default,
        aten.max_pool1d_with_indices.default,
        aten.adaptive_max_pool1d.default,
    ),
    2: (
        aten.max_pool2d.default,
        aten.max_pool2d_with_indices.default,
        aten.adaptive_max_pool2d.default,
    ),
    3: (
        aten.max_pool3d.default,
        aten.max_pool3d_with_indices.default,
        aten.adaptive_max_pool3d.default,
    ),
}
_LINEAR_RESAMPLERS = {
    1: (
        aten.avg_pool1d.default,
        aten.adaptive_avg_pool1d.default,
        aten.upsample_nearest1d.default,
        aten.upsample_nearest1d.vec,
        private_aten_op("upsample_nearest_exact1d"),
        private_aten_op("upsample_nearest_exact1d.vec"),
        aten.upsample_linear1d.default,
        aten.upsample_linear1d.vec,
    ),
    2: (
        aten.avg_pool2d.default,
        aten.adaptive_avg_pool2d.default,
        private_aten_op("adaptive_avg_pool2d"),
        aten.upsample_nearest2d.default,
        aten.upsample_nearest2d.vec,
        private_aten_op("upsample_nearest_exact2d"),
        private_aten_op("upsample_nearest_exact2d.vec"),
        aten.upsample_bilinear2d.default,
        aten.upsample_bilinear2d.vec,
        aten.upsample_bicubic2d.default,
        aten.upsample_bicubic2d.vec,
        private_aten_op("upsample_bilinear2d_aa"),
        private_aten_op("upsample_bilinear2d_aa.vec"),
        private_aten_op("upsample_bicubic2d_aa"),
        private_aten_op("upsample_bicubic2d_aa.vec"),
    ),
    3: (
        aten.avg_pool3d.default,
        aten.adaptive_avg_pool3d.default,
        private_aten_op("adaptive_avg_pool3d"),
        aten.upsample_nearest3d.default,
        aten.upsample_nearest3d.vec,
        private_aten_op("upsample_nearest_exact3d"),
        private_aten_op("upsample_nearest_exact3d.vec"),
        aten.upsample_trilinear3d.default,
        aten.upsample_trilinear3d.vec,
    ),
}
_SPATIAL_DIMS = {
    op: num_dims
    for kind in (_MAX_POOLS, _LINEAR_RESAMPLERS)
    for num_dims, ops in kind.items()
    for op in ops
}
_LINEAR_OPS = {op for ops in _LINEAR_RESAMPLERS.values() for op in ops}


@rule(*_SPATIAL_DIMS)
def shard_pool(call: OpCall) -> Iterator[Strategy]:
    name = "input" if "input" in call.arguments else "self"
    yield from shard_dims(
        call, name, _leading_dims(call, call.tensor(name), _SPATIAL_DIMS[call.op])
    )
    if call.op in _LINEAR_OPS:
        yield from propagate_partial_sum(call, name)


def _leading_dims(call: OpCall, spec: TensorSpec, num_spatial_dims: int) -> list[int]:
    """The dims before the spatial ones that give every rank a nonempty shard: torch rejects empty
    channels.
    """
    dims = range(spec.num_dims - num_spatial_dims)
    return [dim for dim in dims if has_nonempty_shards(call, spec.shape[dim])]


@rule(aten.max_unpool2d.default, aten.max_unpool3d.default)
def shard_unpool(call: OpCall) -> Iterator[Strategy]:
    num_spatial_dims = 2 if call.op == aten.max_unpool2d.default else 3
    for dim in _leading_dims(call, call.tensor("self"), num_spatial_dims):
        yield make_strategy(call, {"self": Shard(dim), "indices": Shard(dim)}, Shard(dim))


@rule(aten.pixel_shuffle.default, aten.pixel_unshuffle.default, aten.channel_shuffle.default)
def shard_pixel_shuffle(call: OpCall) -> Iterator[Strategy]:
    """Leading dims, and channels where every rank gets complete groups of them before and after."""
    channels = 1 if call.op == aten.channel_shuffle.default else call.tensor("self").num_dims - 3
    sizes = call.tensor("self").shape[:channels]
    # For empty inputs torch returns a wrong shape.
    dims = [dim for dim, size in enumerate(sizes) if has_nonempty_shards(call, size)]
    yield from shard_dims(call, "self", dims)
    yield from propagate_partial_sum(call, "self")
    if call.op != aten.channel_shuffle.default and _has_even_channels(call, channels):
        yield make_strategy(
            call, {"self": Shard(channels)}, Shard(channels), is_permutation_invariant=False
        )


def _has_even_channels(call: OpCall, dim: int) -> bool:
    channel_sizes = [call.tensor("self").shape[dim], call.outputs[0].shape[dim]]
    return all(divides(call.num_ranks, size) for size in channel_sizes)


@rule(aten.grid_sampler.default, aten.grid_sampler_2d.default, aten.grid_sampler_3d.default)
def shard_grid_sampler(call: OpCall) -> Iterator[Strategy]:
    if has_nonempty_shards(call, call.tensor("input").shape[0]):
        yield make_strategy(call, {"input": Shard(0), "grid": Shard(0)}, Shard(0))
    if has_nonempty_shards(call, call.tensor("input").shape[1]):
        yield make_strategy(call, {"input": Shard(1)}, Shard(1))
    yield from propagate_partial_sum(call, "input")
