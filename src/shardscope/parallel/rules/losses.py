"""Losses that compare element with element, then add up or average."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from shardscope.parallel.layouts import Layout
from shardscope.parallel.placements import Partial, Placement, Replicate, Shard, product
from shardscope.parallel.rules.book import rule, speller
from shardscope.parallel.rules.call import Call, Strategy, TensorSpec
from shardscope.parallel.rules.local import Local
from shardscope.parallel.rules.terms import broadcast_cut, lay

__all__ = ["cut_elementwise_loss", "spell_elementwise_loss"]

aten = torch.ops.aten

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
def cut_elementwise_loss(call: Call) -> Iterator[Strategy]:
    whole = _broadcast(call)
    for dim in range(whole.num_dims):
        if whole.shape[dim] == 1:
            continue
        cuts: dict[str, Placement] = {
            name: broadcast_cut(spec, whole, dim) for name, spec in _tensors(call).items()
        }
        result = Shard(dim) if call["reduction"] == _NONE else Partial()
        yield lay(call, cuts, result)


def _tensors(call: Call) -> dict[str, TensorSpec]:
    return {name: one for name, one in call.arguments.items() if isinstance(one, TensorSpec)}


def _broadcast(call: Call) -> TensorSpec:
    """The shape in which elements are compared."""
    pair = [call["self"], call["target"]]
    num_dims = max(one.num_dims for one in pair)
    shapes = [(1,) * (num_dims - one.num_dims) + tuple(one.shape) for one in pair]
    shape = tuple(b if a == 1 else a for a, b in zip(*shapes, strict=True))
    return TensorSpec(shape, call["self"].dtype)


@speller(*_LOSSES)
def spell_elementwise_loss(local: Local) -> Any:
    """A rank's mean counts for as much as it holds of the whole. Of nothing there is no mean."""
    if local["reduction"] != _MEAN:
        return local.repeat()
    share = _share(local)
    if share == 0:
        return local.repeat(reduction=_SUM)
    return local.pen.write(aten.mul.Scalar, local.repeat(), share)


def _share(local: Local) -> float:
    """How much of what is compared lies on this rank."""
    whole = _broadcast(local.call)
    placements = [_cut_along_axis(local, whole, axis) for axis in range(len(local.seat.sizes))]
    here = Layout(whole.shape, tuple(placements)).local_shape(local.seat)
    return float(product(here) / product(whole.shape)) if product(here) != 0 else 0.0


def _cut_along_axis(local: Local, whole: TensorSpec, axis: int) -> Placement:
    for name in ("self", "target"):
        layout = local.input_layout(name)
        cut = layout.placements[axis]
        if isinstance(cut, Shard):
            return cut.at(cut.dim + whole.num_dims - len(layout.shape))
    return Replicate()
