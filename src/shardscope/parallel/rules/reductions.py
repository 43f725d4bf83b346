"""Reductions: dims that stay keep their cut, a dim that goes leaves terms where there are such."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from shardscope.parallel.placements import Partial, Reduction, Shard, cut_size, product
from shardscope.parallel.rules.book import rule, speller
from shardscope.parallel.rules.call import Call, Strategy
from shardscope.parallel.rules.dims import can_be_cut, cut, overloads, sources, terms, wrap
from shardscope.parallel.rules.local import Local

__all__ = ["kept_dims"]

_aten = torch.ops.aten
_SUMS = (_aten.sum.default, _aten.sum.dim_IntList)
_MEANS = (_aten.mean.default, _aten.mean.dim)
_LARGEST = (_aten.amax.default, _aten.max.default)
_SMALLEST = (_aten.amin.default, _aten.min.default)


@rule(
    *(_aten.max.dim, _aten.min.dim, _aten.argmax.default, _aten.argmin.default),
    *(_aten.prod.default, _aten.prod.dim_int, _aten.nanmean.default),
    *(_aten.median.dim, _aten.nanmedian.dim, _aten.mode.default),
    *overloads("var", "std", "var_mean", "std_mean", "logsumexp", "special_logsumexp"),
    *overloads("linalg_vector_norm", "norm", "frobenius_norm"),
)
def kept_dims(call: Call) -> Iterator[Strategy]:
    """Every dim that is still there. What is reduced has to be whole."""
    for new, old in sources(call).items():
        if can_be_cut(call.inputs[0].shape[old]):
            yield cut(call, {0: old}, dict.fromkeys(range(len(call.outputs)), new))


@rule(*_SUMS, *_MEANS)
def sums(call: Call) -> Iterator[Strategy]:
    yield from kept_dims(call)
    yield from _reduced_dims(call, "sum")
    before, after = call.inputs[0].dtype, call.outputs[0].dtype
    if before != torch.bool and torch.promote_types(before, after) == after:
        yield terms(call, 0)


@rule(_aten.nansum.default, *overloads("count_nonzero"))
def counts(call: Call) -> Iterator[Strategy]:
    yield from kept_dims(call)
    yield from _reduced_dims(call, "sum")


@rule(*_LARGEST, *_SMALLEST)
def extremes(call: Call) -> Iterator[Strategy]:
    """The largest of the largest. Its gradient goes to one rank's piece, which none knows alone."""
    yield from kept_dims(call)
    if not _is_differentiated(call):
        reduction: Reduction = "max" if call.op in _LARGEST else "min"
        yield from _reduced_dims(call, reduction)
        if not call.inputs[0].dtype.is_complex:
            yield terms(call, 0, reduction=reduction)


@rule(_aten.aminmax.default)
def both_extremes(call: Call) -> Iterator[Strategy]:
    yield from kept_dims(call)
    if not _is_differentiated(call):
        yield from _reduced_dims(call, "min", "max")


@rule(*overloads("any", "all"))
def truths(call: Call) -> Iterator[Strategy]:
    """True anywhere is the largest truth, true everywhere the smallest."""
    yield from kept_dims(call)
    reduction: Reduction = "max" if "any" in str(call.op) else "min"
    yield from _reduced_dims(call, reduction)
    if call.inputs[0].dtype == torch.bool:
        yield terms(call, 0, reduction=reduction)


@rule(*overloads("cumsum", "cumprod", "logcumsumexp", "cummax", "cummin"))
def running_reductions(call: Call) -> Iterator[Strategy]:
    """Every dim but the one they run along."""
    own = call.inputs[0]
    for dim, size in enumerate(own.shape):
        if dim != wrap(call["dim"], own.num_dims) and can_be_cut(size):
            yield cut(call, {0: dim}, dict.fromkeys(range(len(call.outputs)), dim))
    if call.op is _aten.cumsum.default and own.dtype != torch.bool:
        yield terms(call, 0)


@speller(*_MEANS)
def spell_mean(local: Local) -> Any:
    """The addends of a mean: sums of the pieces, over the number of all elements."""
    kept = set(sources(local.call).values())
    layout = local.inputs[0]
    gone = [dim for dim in range(len(layout.shape)) if dim not in kept]
    if not any(isinstance(one, Shard) and one.dim in gone for one in layout.placements):
        return local.repeat()
    keepdim, dtype = local.arguments.get("keepdim", False), local["dtype"]
    whole = local.pen.write(_aten.sum.dim_IntList, local["self"], gone, keepdim, dtype=dtype)
    number = local.pen.size(product([layout.shape[dim] for dim in gone]))
    return local.pen.write(_aten.div.Scalar, whole, number)


def _reduced_dims(call: Call, *reductions: Reduction) -> Iterator[Strategy]:
    kept = set(sources(call).values())
    for dim, size in enumerate(call.inputs[0].shape):
        if dim not in kept and can_be_cut(size) and _has_work_for_all(call, dim, reductions):
            yield Strategy((Shard(dim),), tuple(Partial(one) for one in reductions))


def _has_work_for_all(call: Call, dim: int, reductions: tuple[Reduction, ...]) -> bool:
    """Nothing at all has no largest element, while its sum is zero."""
    size = call.inputs[0].shape[dim]
    if reductions == ("sum",) or not isinstance(size, int):
        return True
    return cut_size(size, call.num_ranks, call.num_ranks - 1) > 0


def _is_differentiated(call: Call) -> bool:
    return call.is_training and call.inputs[0].dtype.is_floating_point
