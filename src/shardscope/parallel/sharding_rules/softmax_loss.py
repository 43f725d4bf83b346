"""Softmax, losses, and cross entropy with a sharded vocabulary."""

from __future__ import annotations

import math
from collections.abc import Iterator
from math import inf

import torch
from torch import Tensor, fx

from shardscope._torch.dispatch import private_aten_op
from shardscope.parallel.ir.graph import Strategy
from shardscope.parallel.ir.shard_spec import ShardSpec
from shardscope.parallel.sharding_rules.builders import (
    broadcast_shape,
    broadcast_shard,
    detached_max,
    make_strategy,
    shard_dims,
    shardable_dims,
    to_compute_dtype,
)
from shardscope.parallel.sharding_rules.context import LoweringContext, OpCall
from shardscope.parallel.sharding_rules.registry import decomposition, lowering, rule
from shardscope.plan.placements import Partial, Placement, Replicate, Shard, Size, product

aten = torch.ops.aten


@rule(
    *(
        aten.softmax.int,
        aten.log_softmax.int,
        private_aten_op("softmax"),
        private_aten_op("log_softmax"),
    ),
    *(
        aten.special_softmax.default,
        aten.special_log_softmax.default,
        private_aten_op("safe_softmax"),
    ),
)
def shard_softmax(call: OpCall) -> Iterator[Strategy]:
    yield from shard_dims(call, "self", shardable_dims(call.tensor("self"), call.dim()))


@decomposition(aten.softmax.int, aten.special_softmax.default)
def decompose_softmax(self: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    cast = self if dtype is None else self.to(dtype)
    wide = to_compute_dtype(cast)
    powers = (wide - detached_max(wide, dim)).exp()
    return (powers / powers.sum(dim, keepdim=True)).to(cast.dtype)


@decomposition(private_aten_op("safe_softmax"))
def decompose_safe_softmax(self: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """Softmax with zeros where all scores are masked."""
    is_masked = (self == -inf).all(dim, keepdim=True)
    shares = decompose_softmax(torch.where(is_masked, 0.0, self), dim, dtype)
    return torch.where(is_masked, 0.0, shares)


@decomposition(aten.log_softmax.int)
def decompose_log_softmax(self: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    cast = self if dtype is None else self.to(dtype)
    wide = to_compute_dtype(cast)
    shifted = wide - detached_max(wide, dim)
    return (shifted - shifted.exp().sum(dim, keepdim=True).log()).to(cast.dtype)


@decomposition(aten.special_log_softmax.default)
def decompose_special_log_softmax(
    self: Tensor, dim: int, *, dtype: torch.dtype | None = None
) -> Tensor:
    return decompose_log_softmax(self, dim, dtype)


@decomposition(private_aten_op("softmax"))
def decompose_kernel_softmax(self: Tensor, dim: int, half_to_float: bool) -> Tensor:
    return decompose_softmax(self, dim, torch.float32 if half_to_float else None)


@decomposition(private_aten_op("log_softmax"))
def decompose_kernel_log_softmax(self: Tensor, dim: int, half_to_float: bool) -> Tensor:
    return decompose_log_softmax(self, dim, torch.float32 if half_to_float else None)


_NONE, _MEAN, _SUM = 0, 1, 2

_LOSSES = (
    aten.mse_loss.default,
    aten.l1_loss.default,
    aten.smooth_l1_loss.default,
    aten.huber_loss.default,
    aten.soft_margin_loss.default,
    aten.kl_div.default,
    aten.binary_cross_entropy.default,
    aten.binary_cross_entropy_with_logits.default,
)


@rule(*_LOSSES)
def shard_elementwise_loss(call: OpCall) -> Iterator[Strategy]:
    shape = _compared_shape(call)
    for dim, size in enumerate(shape):
        if size == 1:
            continue
        placements = {
            name: broadcast_shard(spec, shape, dim) for name, spec in call.tensors.items()
        }
        result = Shard(dim) if call["reduction"] == _NONE else Partial()
        yield make_strategy(call, placements, result)


def _compared_shape(call: OpCall) -> tuple[Size, ...]:
    """The shape that input and target are broadcast to."""
    return broadcast_shape(call.tensor("self").shape, call.tensor("target").shape)


@lowering(*_LOSSES)
def lower_elementwise_loss(local: LoweringContext) -> fx.Node:
    """Weight the rank's mean by its fraction of all elements. Ranks with an empty shard sum
    instead.
    """
    if local["reduction"] != _MEAN:
        return local.repeat()
    share = _local_fraction(local)
    if share == 0:
        return local.repeat(reduction=_SUM)
    return local.builder.write(aten.mul.Scalar, local.repeat(), share)


def _local_fraction(local: LoweringContext) -> float:
    """The fraction of the compared elements that this rank holds."""
    shape = _compared_shape(local.call)
    axes = range(len(local.coordinate.sizes))
    placements = tuple(_placement_along_axis(local, len(shape), axis) for axis in axes)
    num_local = product(ShardSpec(shape, placements).local_shape(local.coordinate))
    return float(num_local / product(shape)) if num_local != 0 else 0.0


def _placement_along_axis(local: LoweringContext, num_dims: int, axis: int) -> Placement:
    """The placement of the compared elements, which have `num_dims` dims, along a mesh axis."""
    for name in ("self", "target"):
        spec = local.input_spec(name)
        placement = spec.placements[axis]
        if isinstance(placement, Shard):
            return placement.at(placement.dim + num_dims - len(spec.shape))
    return Replicate()


_NLL = (aten.nll_loss.default, aten.nll_loss_nd.default, aten.nll_loss2d.default)


@rule(aten.cross_entropy_loss.default, *_NLL)
def shard_class_loss(call: OpCall) -> Iterator[Strategy]:
    """Every dim but the classes. Not for a mean, whose divisor depends on the weights of all
    samples.
    """
    if call["reduction"] == _MEAN:
        return
    scores, target = call.tensor("self"), call.tensor("target")
    has_class_probabilities = target.shape == scores.shape and scores.num_dims > 0
    class_dim = min(1, scores.num_dims - 1)
    for dim in scores.dims_except(class_dim):
        target_dim = dim - (dim > class_dim)
        placements = {
            "self": Shard(dim),
            "target": Shard(dim if has_class_probabilities else target_dim),
        }
        result = Shard(target_dim) if call["reduction"] == _NONE else Partial()
        yield make_strategy(call, placements, result)


@decomposition(aten.cross_entropy_loss.default)
def decompose_cross_entropy(
    self: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: int = _MEAN,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Tensor:
    logs = _log_softmax(self)
    if target.is_floating_point():
        losses = _compare_with_probabilities(logs, target, weight, label_smoothing)
        count = math.prod(losses.shape)
        return _reduce_losses(losses, reduction, torch.full((), count, device=self.device)).to(
            self.dtype
        )
    class_scores, weights = _select_class_scores(logs, target, weight, ignore_index)
    losses = -class_scores * weights
    if label_smoothing > 0:
        even = -_apply_class_weights(logs, weight).sum(_class_dim(logs))
        even = even.masked_fill(target == ignore_index, 0.0)
        share = label_smoothing / self.shape[_class_dim(self)]
        losses = losses * (1 - label_smoothing) + even * share
    return _reduce_losses(losses, reduction, weights.sum()).to(self.dtype)


@decomposition(*_NLL)
def decompose_nll(
    self: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: int = _MEAN,
    ignore_index: int = -100,
) -> Tensor:
    class_scores, weights = _select_class_scores(self, target, weight, ignore_index)
    return _reduce_losses(-class_scores * weights, reduction, weights.sum())


@decomposition(aten.nll_loss_forward.default, aten.nll_loss2d_forward.default)
def decompose_nll_forward(
    self: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignore_index: int
) -> tuple[Tensor, Tensor]:
    """Also returns the sum of the weights, or zero if nothing is reduced."""
    class_scores, weights = _select_class_scores(self, target, weight, ignore_index)
    total = weights.sum()
    loss = _reduce_losses(-class_scores * weights, reduction, total)
    return loss, torch.zeros_like(total) if reduction == _NONE else total


def _class_dim(scores: Tensor) -> int:
    return min(1, scores.dim() - 1)


def _log_softmax(logits: Tensor) -> Tensor:
    """Subtracts the largest logit as a constant: it cancels, in the gradient too."""
    dim = _class_dim(logits)
    wide = to_compute_dtype(logits)
    shifted = wide - detached_max(wide, dim)
    return shifted - shifted.exp().sum(dim, keepdim=True).log()


def _select_class_scores(
    scores: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int
) -> tuple[Tensor, Tensor]:
    """Each sample's score for its class, and its weight: zero if it is ignored.

    By comparison instead of indexing, so that each rank finds the classes that it holds.
    """
    dim = _class_dim(scores)
    classes = _along_classes(torch.arange(scores.shape[dim], device=scores.device), scores)
    is_ignored = target == ignore_index
    is_class = (target.unsqueeze(dim) == classes) & ~is_ignored.unsqueeze(dim)
    class_scores = torch.where(is_class, scores, 0.0).sum(dim)
    if weight is None:
        return class_scores, (~is_ignored).to(scores.dtype)
    return class_scores, torch.where(is_class, _along_classes(weight, scores), 0.0).sum(dim).to(
        scores.dtype
    )


def _along_classes(values: Tensor, scores: Tensor) -> Tensor:
    return values.reshape([-1] + [1] * (scores.dim() - 1 - _class_dim(scores)))


def _apply_class_weights(logs: Tensor, weight: Tensor | None) -> Tensor:
    return logs if weight is None else logs * _along_classes(weight, logs)


def _compare_with_probabilities(
    logs: Tensor, target: Tensor, weight: Tensor | None, smoothing: float
) -> Tensor:
    if smoothing > 0:
        target = target * (1 - smoothing) + smoothing / logs.shape[_class_dim(logs)]
    return -(_apply_class_weights(logs, weight) * target).sum(_class_dim(logs))


def _reduce_losses(losses: Tensor, reduction: int, total: Tensor) -> Tensor:
    if reduction == _NONE:
        return losses
    return losses.sum() / total if reduction == _MEAN else losses.sum()
