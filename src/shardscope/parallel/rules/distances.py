"""Distances and similarities of vectors: along other dims, or taken apart where vectors are cut."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from shardscope.parallel.placements import Size
from shardscope.parallel.rules.book import decomposition, rule
from shardscope.parallel.rules.call import Call, Strategy
from shardscope.parallel.rules.contractions import Labels, broadcast_labels
from shardscope.parallel.rules.dims import can_be_cut, cut, wrap
from shardscope.parallel.rules.pointwise import broadcast_cuts
from shardscope.parallel.rules.precision import as_wide, safe_root

__all__ = [
    "cdists",
    "crosses",
    "pairs",
    "take_cosine_similarity_apart",
    "take_dist_apart",
    "take_pairwise_distance_apart",
]

_aten = torch.ops.aten


@rule(_aten.cosine_similarity.default, _aten.pairwise_distance.default)
def pairs(call: Call) -> Iterator[Strategy]:
    """One number for each pair of vectors; which dim the vectors lie along is the op's to say."""
    whole = _broadcast(call)
    gone = wrap(call.arguments.get("dim", -1), len(whole))
    is_kept = call.arguments.get("keepdim", False)
    for dim, inputs in broadcast_cuts(call, whole):
        if dim != gone:
            yield cut(call, inputs, {0: dim if is_kept or dim < gone else dim - 1})


@rule(_aten.linalg_cross.default)
def crosses(call: Call) -> Iterator[Strategy]:
    whole = call.outputs[0].shape
    for dim, inputs in broadcast_cuts(call, whole):
        if dim != wrap(call["dim"], len(whole)):
            yield cut(call, inputs, {0: dim})


@rule(_aten.cdist.default)
def cdists(call: Call) -> Iterator[Strategy]:
    """Rows with rows: dims before the last two are batches, matched from the back."""
    whole = call.outputs[0].shape
    batch = [f"batch {dim}" for dim in range(len(whole) - 2)]
    names = [
        [*_batch_labels(one.shape, batch, whole), own, None]
        for one, own in zip(call.inputs, ("left", "right"), strict=True)
    ]
    for dim, name in enumerate([*batch, "left", "right"]):
        inputs = {at: own.index(name) for at, own in enumerate(names) if name in own}
        if can_be_cut(whole[dim]):
            yield cut(call, inputs, {0: dim})


@decomposition(_aten.cosine_similarity.default)
def take_cosine_similarity_apart(x1: Tensor, x2: Tensor, dim: int = 1, eps: float = 1e-8) -> Tensor:
    shape = torch.broadcast_shapes(x1.shape, x2.shape)  # type: ignore[no-untyped-call]
    left, right = (as_wide(one).expand(shape) for one in (x1, x2))
    lengths = [safe_root((one * one).sum(dim)).clamp_min(eps) for one in (left, right)]
    found = (left * right).sum(dim) / (lengths[0] * lengths[1])
    return found.to(x1.dtype) if x1.dtype == x2.dtype else found


@decomposition(_aten.pairwise_distance.default)
def take_pairwise_distance_apart(
    x1: Tensor, x2: Tensor, p: float = 2, eps: float = 1e-6, keepdim: bool = False
) -> Tensor:
    found: Tensor = torch.linalg.vector_norm(x1 - x2 + eps, p, -1, keepdim)
    return found


@decomposition(_aten.dist.default)
def take_dist_apart(self: Tensor, other: Tensor, p: float = 2) -> Tensor:
    found: Tensor = torch.linalg.vector_norm(self - other, p)
    return found


def _broadcast(call: Call) -> list[Size]:
    """The shape that both are broadcast to: of two sizes, the one that is not one."""
    shapes = [one.shape for one in call.inputs]
    most = max(len(shape) for shape in shapes)
    padded = [(1,) * (most - len(shape)) + tuple(shape) for shape in shapes]
    return [other if one == 1 else one for one, other in zip(*padded, strict=True)]


def _batch_labels(shape: Sequence[Size], batch: Labels, whole: Sequence[Size]) -> Labels:
    return broadcast_labels(shape[:-2], batch, whole[:-2])
