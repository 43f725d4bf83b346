"""Pooling and resizing: pictures stay whole, batch and channels may be cut."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from shardscope._torch.inner_ops import inner_op
from shardscope.parallel.placements import Shard, divides
from shardscope.parallel.rules.book import rule
from shardscope.parallel.rules.call import Call, Strategy, TensorSpec
from shardscope.parallel.rules.terms import lay, leaves_some, pass_terms

__all__ = ["cut_grid_sampler", "cut_pool", "cut_shuffled", "cut_unpool"]

aten = torch.ops.aten

_MAXIMA = {
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
_LINEAR = {
    1: (
        aten.avg_pool1d.default,
        aten.adaptive_avg_pool1d.default,
        aten.upsample_nearest1d.default,
        aten.upsample_nearest1d.vec,
        inner_op("upsample_nearest_exact1d"),
        inner_op("upsample_nearest_exact1d.vec"),
        aten.upsample_linear1d.default,
        aten.upsample_linear1d.vec,
    ),
    2: (
        aten.avg_pool2d.default,
        aten.adaptive_avg_pool2d.default,
        inner_op("adaptive_avg_pool2d"),
        aten.upsample_nearest2d.default,
        aten.upsample_nearest2d.vec,
        inner_op("upsample_nearest_exact2d"),
        inner_op("upsample_nearest_exact2d.vec"),
        aten.upsample_bilinear2d.default,
        aten.upsample_bilinear2d.vec,
        aten.upsample_bicubic2d.default,
        aten.upsample_bicubic2d.vec,
        inner_op("upsample_bilinear2d_aa"),
        inner_op("upsample_bilinear2d_aa.vec"),
        inner_op("upsample_bicubic2d_aa"),
        inner_op("upsample_bicubic2d_aa.vec"),
    ),
    3: (
        aten.avg_pool3d.default,
        aten.adaptive_avg_pool3d.default,
        inner_op("adaptive_avg_pool3d"),
        aten.upsample_nearest3d.default,
        aten.upsample_nearest3d.vec,
        inner_op("upsample_nearest_exact3d"),
        inner_op("upsample_nearest_exact3d.vec"),
        aten.upsample_trilinear3d.default,
        aten.upsample_trilinear3d.vec,
    ),
}
_SPATIAL_DIMS = {
    op: num_dims for kind in (_MAXIMA, _LINEAR) for num_dims, ops in kind.items() for op in ops
}
_ALL_LINEAR = {op for ops in _LINEAR.values() for op in ops}


@rule(*_SPATIAL_DIMS)
def cut_pool(call: Call) -> Iterator[Strategy]:
    name = "input" if "input" in call.arguments else "self"
    for dim in _dims_before_pixels(call, call[name], _SPATIAL_DIMS[call.op]):
        yield lay(call, {name: Shard(dim)}, Shard(dim))
    if call.op in _ALL_LINEAR:
        yield from pass_terms(call, name)


def _dims_before_pixels(call: Call, spec: TensorSpec, num_spatial_dims: int) -> list[int]:
    """Those of which every rank gets some: without channels torch refuses."""
    dims = range(spec.num_dims - num_spatial_dims)
    return [dim for dim in dims if leaves_some(call, spec.shape[dim])]


@rule(aten.max_unpool2d.default, aten.max_unpool3d.default)
def cut_unpool(call: Call) -> Iterator[Strategy]:
    num_spatial_dims = 2 if call.op == aten.max_unpool2d.default else 3
    for dim in _dims_before_pixels(call, call["self"], num_spatial_dims):
        yield lay(call, {"self": Shard(dim), "indices": Shard(dim)}, Shard(dim))


@rule(aten.pixel_shuffle.default, aten.pixel_unshuffle.default, aten.channel_shuffle.default)
def cut_shuffled(call: Call) -> Iterator[Strategy]:
    """Channels become pixels, or pixels channels: both are cut where a rank gets whole ones."""
    channels = 1 if call.op == aten.channel_shuffle.default else call["self"].num_dims - 3
    for dim in range(channels):
        if leaves_some(call, call["self"].shape[dim]):  # of nothing torch gives the wrong shape
            yield lay(call, {"self": Shard(dim)}, Shard(dim))
    yield from pass_terms(call, "self")
    if call.op != aten.channel_shuffle.default and _share_channels(call, channels):
        yield lay(call, {"self": Shard(channels)}, Shard(channels), is_order_blind=False)


def _share_channels(call: Call, dim: int) -> bool:
    sizes: list[Any] = [call["self"].shape[dim], call.outputs[0].shape[dim]]
    return all(divides(call.num_ranks, size) for size in sizes)


@rule(aten.grid_sampler.default, aten.grid_sampler_2d.default, aten.grid_sampler_3d.default)
def cut_grid_sampler(call: Call) -> Iterator[Strategy]:
    if leaves_some(call, call["input"].shape[0]):
        yield lay(call, {"input": Shard(0), "grid": Shard(0)}, Shard(0))
    if leaves_some(call, call["input"].shape[1]):
        yield lay(call, {"input": Shard(1)}, Shard(1))
    yield from pass_terms(call, "input")
