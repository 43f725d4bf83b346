"""Pointwise ops: cut along any dim; and those among them that are linear, which keep addends."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from shardscope._torch.dispatch import op_packet, op_schema
from shardscope.parallel.placements import Partial, Size
from shardscope.parallel.rules.book import rule
from shardscope.parallel.rules.call import Call, Strategy, TensorSpec
from shardscope.parallel.rules.dims import can_be_cut, cut, matched_dims, overloads, terms

__all__ = ["broadcast_cuts", "is_pointwise", "pointwise_strategies"]

_aten = torch.ops.aten


def is_pointwise(op: Any) -> bool:
    """Whether torch marks the op as one that works on each element alone, without chance."""
    tags, schema = op.tags, op_schema(op)
    is_random = torch.Tag.nondeterministic_seeded in tags
    # equal() is marked too, and compares each element, but returns one truth.
    has_elements = all(str(one.type) == "Tensor" for one in schema.returns)
    is_marked = torch.Tag.pointwise in tags and not is_random
    return is_marked and has_elements and not schema.is_mutable


# Ops that torch does not mark, mostly other names of marked ones.
_UNMARKED = overloads(
    *("absolute", "negative", "subtract", "multiply", "divide", "true_divide", "floor_divide"),
    *("greater", "greater_equal", "less", "less_equal", "not_equal", "rsub", "special_expit"),
    *("arccos", "arccosh", "arcsin", "arcsinh", "arctan", "arctan2", "arctanh", "fix", "fill"),
    *("special_erf", "special_erfc", "special_expm1", "special_log1p", "special_exp2", "__and__"),
    *("special_ndtr", "special_log_softplus", "special_xlogy", "special_logit", "__or__"),
    *("hardswish", "log_sigmoid", "masked_fill", "float_power"),
    *("complex", "polar", "real", "imag", "conj", "_conj", "resolve_conj", "resolve_neg"),
    *("_neg_view", "_prelu_kernel", "isreal", "square", "logical_not", "nan_to_num", "isclose"),
)
# Of one argument alone, where() is nonzero().
_WHERE = (_aten.where.ScalarOther, _aten.where.ScalarSelf, _aten.where.Scalar)


@rule(*(op for op in _UNMARKED if not is_pointwise(op)), *_WHERE)
def pointwise_strategies(call: Call) -> Iterator[Strategy]:
    """Along every dim of the result: what is broadcast along it stays whole."""
    for dim, inputs in broadcast_cuts(call, call.outputs[0].shape):
        yield cut(call, inputs, dict.fromkeys(range(len(call.outputs)), dim))
    linear = _LINEAR.get(op_packet(call.op).__name__)
    if linear is not None:
        yield from (one for one in linear(call) if _can_add(call, one))


def broadcast_cuts(call: Call, whole: Sequence[Size]) -> Iterator[tuple[int, dict[int, int]]]:
    """Each dim of the shape that the inputs are broadcast to, and which input dims it is."""
    matches = [dict(matched_dims(one.shape, whole)) for one in call.inputs]
    for dim, size in enumerate(whole):
        inputs = {
            position: own
            for position, found in enumerate(matches)
            for own, shared in found.items()
            if shared == dim
        }
        if can_be_cut(size) and inputs:
            yield dim, inputs


def _can_add(call: Call, strategy: Strategy) -> bool:
    """Truths are no addends: their sum is another truth."""
    placed = zip(strategy.inputs, call.inputs, strict=True)
    return not any(one == Partial() and spec.dtype == torch.bool for one, spec in placed)


@rule(_aten.prelu.default)
def prelu(call: Call) -> Iterator[Strategy]:
    """A weight for each channel, which is dim 1, or one for all."""
    for dim, size in enumerate(call.outputs[0].shape):
        if can_be_cut(size):
            has_own_weight = dim == 1 and can_be_cut(call["weight"].shape[0])
            yield cut(call, {0: dim, 1: 0} if has_own_weight else {0: dim}, {0: dim})


def _together(call: Call) -> Iterable[Strategy]:
    """Linear in all its tensors at once. A number added to each addend would count each time."""
    names = [name for name in ("self", "other") if name in call.arguments]
    if all(isinstance(call[name], TensorSpec) for name in names):
        yield terms(call, *range(len(call.inputs)))


def _one_at_a_time(call: Call) -> Iterable[Strategy]:
    """Linear in each of its tensors, the others fixed: a product."""
    for position in range(len(call.inputs)):
        yield terms(call, position)


def _in_the_first(call: Call) -> Iterable[Strategy]:
    if isinstance(call.arguments.get("self", call.inputs[0]), TensorSpec):
        yield terms(call, 0)


def _in_the_dividend(call: Call) -> Iterable[Strategy]:
    if call.arguments.get("rounding_mode") is None:
        yield from _in_the_first(call)


def _where(call: Call) -> Iterable[Strategy]:
    """Chosen from addends by a condition that all ranks know; zero is the addends of zero."""
    chosen = [
        name for name in ("self", "other") if isinstance(call.arguments.get(name), TensorSpec)
    ]
    others = [call.arguments.get(name) for name in ("self", "other") if name not in chosen]
    if chosen and all(_is_zero(one) for one in others):
        yield terms(call, *range(1, len(call.inputs)))


def _masked_fill(call: Call) -> Iterable[Strategy]:
    if isinstance(call["value"], TensorSpec):
        yield terms(call, 0, 2)
    elif _is_zero(call["value"]):
        yield terms(call, 0)


def _is_zero(value: Any) -> bool:
    return isinstance(value, (int, float)) and value == 0


_LINEAR: dict[str, Callable[[Call], Iterable[Strategy]]] = {
    **dict.fromkeys(("add", "sub", "subtract", "rsub", "complex"), _together),
    **dict.fromkeys(("mul", "multiply"), _one_at_a_time),
    **dict.fromkeys(("div", "divide", "true_divide"), _in_the_dividend),
    **dict.fromkeys(("neg", "negative", "positive", "real", "imag"), _in_the_first),
    **dict.fromkeys(("conj", "_conj", "conj_physical", "resolve_conj"), _in_the_first),
    **dict.fromkeys(("resolve_neg", "_neg_view", "deg2rad", "rad2deg"), _in_the_first),
    "where": _where,
    "masked_fill": _masked_fill,
}
