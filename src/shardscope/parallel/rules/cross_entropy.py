"""Losses that pick each sample's class, with batch or classes (a vocabulary) cut.

Logits are never gathered: over the classes only maxima and sums are exchanged, one number a sample.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from shardscope.parallel.placements import Partial, Shard
from shardscope.parallel.rules.book import decomposition, rule
from shardscope.parallel.rules.call import Call, Strategy
from shardscope.parallel.rules.terms import lay

__all__ = [
    "cut_class_loss",
    "take_cross_entropy_apart",
    "take_nll_apart",
    "take_nll_forward_apart",
]

aten = torch.ops.aten

_NONE, _MEAN, _SUM = 0, 1, 2

_NLL = (aten.nll_loss.default, aten.nll_loss_nd.default, aten.nll_loss2d.default)


@rule(aten.cross_entropy_loss.default, *_NLL)
def cut_class_loss(call: Call) -> Iterator[Strategy]:
    """By samples, unless it averages: by how many is known only when all have counted."""
    if call["reduction"] == _MEAN:
        return
    scores, target = call["self"], call["target"]
    is_one_per_class = target.shape == scores.shape and scores.num_dims > 0
    classes = min(1, scores.num_dims - 1)
    for dim in range(scores.num_dims):
        if dim != classes:
            kept = dim - (dim > classes)
            cuts = {"self": Shard(dim), "target": Shard(dim if is_one_per_class else kept)}
            yield lay(call, cuts, Shard(kept) if call["reduction"] == _NONE else Partial())


@decomposition(aten.cross_entropy_loss.default)
def take_cross_entropy_apart(
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
        return _reduce(losses, reduction, torch.full((), count, device=self.device)).to(self.dtype)
    picked, weights = _pick(logs, target, weight, ignore_index)
    losses = -picked * weights
    if label_smoothing > 0:
        even = -_weigh(logs, weight).sum(_class_dim(logs))
        even = even.masked_fill(target == ignore_index, 0.0)
        share = label_smoothing / self.shape[_class_dim(self)]
        losses = losses * (1 - label_smoothing) + even * share
    return _reduce(losses, reduction, weights.sum()).to(self.dtype)


@decomposition(*_NLL)
def take_nll_apart(
    self: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: int = _MEAN,
    ignore_index: int = -100,
) -> Tensor:
    picked, weights = _pick(self, target, weight, ignore_index)
    return _reduce(-picked * weights, reduction, weights.sum())


@decomposition(aten.nll_loss_forward.default, aten.nll_loss2d_forward.default)
def take_nll_forward_apart(
    self: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignore_index: int
) -> tuple[Tensor, Tensor]:
    """The op that also returns the sum of the weights, except where it reduces nothing."""
    picked, weights = _pick(self, target, weight, ignore_index)
    total = weights.sum()
    loss = _reduce(-picked * weights, reduction, total)
    return loss, torch.zeros_like(total) if reduction == _NONE else total


def _class_dim(scores: Tensor) -> int:
    return min(1, scores.dim() - 1)


def _log_softmax(logits: Tensor) -> Tensor:
    """The largest logit is taken off as a constant: it cancels, in the gradient too."""
    dim = _class_dim(logits)
    wide = logits.float() if logits.dtype in (torch.half, torch.bfloat16) else logits
    shifted = wide - wide.detach().amax(dim, keepdim=True)
    return shifted - shifted.exp().sum(dim, keepdim=True).log()


def _pick(
    scores: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int
) -> tuple[Tensor, Tensor]:
    """Each sample's score for its class, and what it weighs: nothing if it is ignored.

    By comparison rather than by index, so that a rank finds the classes that it holds.
    """
    dim = _class_dim(scores)
    classes = _along_classes(torch.arange(scores.shape[dim], device=scores.device), scores)
    is_ignored = target == ignore_index
    is_class = (target.unsqueeze(dim) == classes) & ~is_ignored.unsqueeze(dim)
    picked = torch.where(is_class, scores, 0.0).sum(dim)
    if weight is None:
        return picked, (~is_ignored).to(scores.dtype)
    return picked, torch.where(is_class, _along_classes(weight, scores), 0.0).sum(dim).to(
        scores.dtype
    )


def _along_classes(values: Tensor, scores: Tensor) -> Tensor:
    return values.reshape([-1] + [1] * (scores.dim() - 1 - _class_dim(scores)))


def _weigh(logs: Tensor, weight: Tensor | None) -> Tensor:
    return logs if weight is None else logs * _along_classes(weight, logs)


def _compare_with_probabilities(
    logs: Tensor, target: Tensor, weight: Tensor | None, smoothing: float
) -> Tensor:
    if smoothing > 0:
        target = target * (1 - smoothing) + smoothing / logs.shape[_class_dim(logs)]
    return -(_weigh(logs, weight) * target).sum(_class_dim(logs))


def _reduce(losses: Tensor, reduction: int, total: Tensor) -> Tensor:
    if reduction == _NONE:
        return losses
    return losses.sum() / total if reduction == _MEAN else losses.sum()
