"""Convolutions: in pieces of the batch, of the channels, or of the groups."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from shardscope.parallel.placements import Partial, Shard, divides
from shardscope.parallel.rules.book import DECOMPOSITIONS, rule, speller
from shardscope.parallel.rules.call import Call, Strategy
from shardscope.parallel.rules.local import Local
from shardscope.parallel.rules.terms import lay, leaves_some

__all__ = ["cut_convolution", "spell_convolution"]

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
def cut_convolution(call: Call) -> Iterator[Strategy]:
    """Pictures are not cut: neighbours would have to be exchanged."""
    has_batch = call["input"].num_dims == call["weight"].num_dims
    channels = Shard(int(has_batch))
    if has_batch:
        yield lay(call, {"input": Shard(0)}, Shard(0))
    if _num_groups(call) == 1:
        yield from _cut_channels(call, channels)
    else:
        yield from _cut_groups(call, channels)
    if call["bias"] is None:
        yield lay(call, {"input": Partial()}, Partial())
        yield lay(call, {"weight": Partial()}, Partial())


def _cut_channels(call: Call, channels: Shard) -> Iterator[Strategy]:
    into, out_of = (0, 1) if _is_transposed(call) else (1, 0)
    if leaves_some(call, call.outputs[0].shape[channels.dim]):
        yield lay(call, {"weight": Shard(out_of), "bias": Shard(0)}, channels)
    if call["bias"] is None and leaves_some(call, call["input"].shape[channels.dim]):
        yield lay(call, {"input": channels, "weight": Shard(into)}, Partial())


def _cut_groups(call: Call, channels: Shard) -> Iterator[Strategy]:
    """Every rank gets whole groups: of the input's channels, of the kernels, of the output's."""
    if divides(call.num_ranks, _num_groups(call)):
        cuts = {"input": channels, "weight": Shard(0), "bias": Shard(0)}
        yield lay(call, cuts, channels, is_order_blind=False)


def _is_transposed(call: Call) -> bool:
    return call.op in _TRANSPOSED or bool(call.arguments.get("transposed"))


def _num_groups(call: Call) -> int:
    """Counted by sizes: an axis before may have cut the groups."""
    channels = int(call["input"].num_dims == call["weight"].num_dims)
    many = call.outputs[0] if _is_transposed(call) else call["input"]
    return int(many.shape[channels] // call["weight"].shape[1])


@speller(*_CONVOLUTIONS)
def spell_convolution(local: Local) -> Any:
    """Where groups are cut, a rank has fewer of them."""
    picture, kernels = local.input_layout("input"), local.input_layout("weight")
    channels = int(len(picture.shape) == len(kernels.shape))
    many = local.outputs[0] if _is_transposed(local.call) else picture
    num_channels = many.local_shape(local.seat)[channels]
    per_group = kernels.local_shape(local.seat)[1]
    assert num_channels % per_group == 0, "a rank has to hold whole groups"
    return local.repeat(groups=num_channels // per_group)


def _take_bias_apart(op: Any) -> Any:
    """The op without its bias, which is added after the sum over the input's channels."""

    def convolve(
        input: Tensor, weight: Tensor, bias: Tensor | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        if bias is None:
            raise NotImplementedError
        num_spatial_dims = weight.dim() - 2
        return op(input, weight, None, *args, **kwargs) + bias.reshape(-1, *[1] * num_spatial_dims)

    return convolve


DECOMPOSITIONS.update({op: _take_bias_apart(op) for op in _CONVOLUTIONS})
