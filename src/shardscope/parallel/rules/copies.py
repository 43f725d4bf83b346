"""Copies and casts: the same values under another dtype, in other memory, or out of autograd."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from shardscope._torch.inner_ops import inner_op
from shardscope.parallel.rules.book import rule
from shardscope.parallel.rules.call import Call, Strategy
from shardscope.parallel.rules.dims import (
    can_be_cut,
    cut,
    overloads,
    reductions_of,
    terms,
    with_any_other,
)
from shardscope.parallel.rules.pointwise import broadcast_cuts

__all__ = ["casts_like_another", "complex_views", "copies", "overwrites"]

_aten = torch.ops.aten


@rule(
    *(_aten.clone.default, _aten.alias.default, _aten.detach.default, _aten.contiguous.default),
    *(_aten.lift_fresh_copy.default, _aten.lift_fresh.default, _aten.lift.default),
    *(_aten.to.dtype, _aten.to.device, _aten.to.dtype_layout, inner_op("to_copy")),
    *overloads("pin_memory", "_pin_memory"),
)
def copies(call: Call) -> Iterator[Strategy]:
    """Along every dim, and in addends where casting loses nothing of them."""
    for dim, size in enumerate(call.inputs[0].shape):
        if can_be_cut(size):
            yield cut(call, {0: dim}, {0: dim})
    before, after = call.inputs[0].dtype, call.outputs[0].dtype
    for reduction in reductions_of(before):
        if reduction not in reductions_of(after):
            continue
        # The largest value is the largest in any dtype; a sum of rounded terms is not the sum.
        if reduction != "sum" or torch.promote_types(before, after) == after:
            yield terms(call, 0, reduction=reduction)


@rule(_aten.type_as.default, _aten.to.other)
def casts_like_another(call: Call) -> Iterator[Strategy]:
    """As copies. Of the other tensor only the dtype counts, so it may lie as it likes."""
    for strategy in copies(call):
        yield from with_any_other(call, strategy)


@rule(_aten.view_as_real.default, _aten.view_as_complex.default)
def complex_views(call: Call) -> Iterator[Strategy]:
    """The two parts of a number are the last dim of the real one; that stays whole."""
    num_dims = min(call.inputs[0].num_dims, call.outputs[0].num_dims)
    for dim, size in enumerate(call.inputs[0].shape[:num_dims]):
        if can_be_cut(size):
            yield cut(call, {0: dim}, {0: dim})
    yield terms(call, 0)


@rule(_aten.copy.default)
def overwrites(call: Call) -> Iterator[Strategy]:
    """The source in the place of what was there, of which only the shape and the dtype are left."""
    for dim, inputs in broadcast_cuts(call, call.outputs[0].shape):
        yield cut(call, {**inputs, 0: dim}, {0: dim})
    source, kept = call["src"].dtype, call.outputs[0].dtype
    if source != torch.bool and torch.promote_types(source, kept) == kept:
        yield terms(call, 1)
        yield terms(call, 0, 1)
