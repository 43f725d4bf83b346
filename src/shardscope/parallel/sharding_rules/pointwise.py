"""Pointwise ops, copies and casts, factories of the same shape, and broadcasting."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch

from shardscope._torch.dispatch import OpOverload, op_packet, op_schema, private_aten_op
from shardscope.parallel.ir.graph import Strategy
from shardscope.parallel.sharding_rules.builders import (
    broadcast_shard,
    broadcast_shards,
    can_be_sharded,
    make_strategy,
    overloads,
    partial_strategy,
    propagate_partial,
    reductions_of,
    shard_dims,
    shardable_dims,
    with_any_placement,
)
from shardscope.parallel.sharding_rules.context import OpCall, TensorSpec
from shardscope.parallel.sharding_rules.registry import rule, rule_where
from shardscope.plan.placements import Partial, Replicate, Shard

aten = torch.ops.aten


def is_pointwise(op: OpOverload) -> bool:
    """Whether torch tags the op as pointwise and it is not random."""
    tags, schema = op.tags, op_schema(op)
    is_random = torch.Tag.nondeterministic_seeded in tags
    # equal() is tagged too, and compares each element, but returns a single bool.
    has_elements = all(str(returned.type) == "Tensor" for returned in schema.returns)
    is_marked = torch.Tag.pointwise in tags and not is_random
    return is_marked and has_elements and not schema.is_mutable


# Ops that torch does not tag, mostly aliases of tagged ones.
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
# With one argument, where() is nonzero().
_WHERE = (aten.where.ScalarOther, aten.where.ScalarSelf, aten.where.Scalar)


@rule_where(is_pointwise)
@rule(*(op for op in _UNMARKED if not is_pointwise(op)), *_WHERE)
def pointwise_strategies(call: OpCall) -> Iterator[Strategy]:
    """Every dim of the result; inputs that are broadcast along it are replicated. Partial where
    linear.
    """
    for dim, placements in broadcast_shards(call, call.outputs[0].shape):
        yield make_strategy(call, placements, Shard(dim))
    linear_strategies = _LINEAR.get(op_packet(call.op).__name__)
    if linear_strategies is not None:
        yield from (
            strategy for strategy in linear_strategies(call) if _has_summable_dtypes(call, strategy)
        )


def _has_summable_dtypes(call: OpCall, strategy: Strategy) -> bool:
    """Whether no bool tensor is a partial sum: bools do not add up."""
    pairs = zip(strategy.inputs, call.inputs, strict=True)
    return not any(placement == Partial() and spec.dtype == torch.bool for placement, spec in pairs)


@rule(aten.prelu.default)
def shard_prelu(call: OpCall) -> Iterator[Strategy]:
    """Every dim; the weight is sharded with dim 1, the channels, if it has an element for each."""
    for dim in shardable_dims(call.tensor("self")):
        has_own_weight = dim == 1 and can_be_sharded(call.tensor("weight").shape[0])
        weight = Shard(0) if has_own_weight else Replicate()
        yield make_strategy(call, {"self": Shard(dim), "weight": weight}, Shard(dim))


def _linear_in_all(call: OpCall) -> Iterable[Strategy]:
    """Linear in all its tensors at once. A scalar would be added once per rank, so there must be
    none.
    """
    names = [name for name in ("self", "other") if name in call.arguments]
    if all(isinstance(call[name], TensorSpec) for name in names):
        yield partial_strategy(call, *call.tensors)


def _linear_in_each(call: OpCall) -> Iterable[Strategy]:
    """Linear in each of its tensors while the rest are fixed, as a product is."""
    for name in call.tensors:
        yield partial_strategy(call, name)


def _linear_in_self(call: OpCall) -> Iterable[Strategy]:
    if "self" in call.tensors:
        yield partial_strategy(call, "self")


def _linear_in_dividend(call: OpCall) -> Iterable[Strategy]:
    if call.arguments.get("rounding_mode") is None:
        yield from _linear_in_self(call)


def _linear_where(call: OpCall) -> Iterable[Strategy]:
    """Partial branches chosen by a replicated condition; a scalar branch must be zero."""
    branches = {name: call.arguments.get(name) for name in ("self", "other")}
    tensor_names = [name for name in branches if name in call.tensors]
    numbers = [value for name, value in branches.items() if name not in tensor_names]
    if tensor_names and all(_is_zero(number) for number in numbers):
        yield partial_strategy(call, *tensor_names)


def _linear_masked_fill(call: OpCall) -> Iterable[Strategy]:
    if "value" in call.tensors:
        yield partial_strategy(call, "self", "value")
    elif _is_zero(call["value"]):
        yield partial_strategy(call, "self")


def _is_zero(value: object) -> bool:
    return isinstance(value, (int, float)) and value == 0


_LINEAR: dict[str, Callable[[OpCall], Iterable[Strategy]]] = {
    **dict.fromkeys(("add", "sub", "subtract", "rsub", "complex"), _linear_in_all),
    **dict.fromkeys(("mul", "multiply"), _linear_in_each),
    **dict.fromkeys(("div", "divide", "true_divide"), _linear_in_dividend),
    **dict.fromkeys(("neg", "negative", "positive", "real", "imag"), _linear_in_self),
    **dict.fromkeys(("conj", "_conj", "conj_physical", "resolve_conj"), _linear_in_self),
    **dict.fromkeys(("resolve_neg", "_neg_view", "deg2rad", "rad2deg"), _linear_in_self),
    "where": _linear_where,
    "masked_fill": _linear_masked_fill,
}


@rule(
    *(aten.clone.default, aten.alias.default, aten.detach.default, aten.contiguous.default),
    *(aten.lift_fresh_copy.default, aten.lift_fresh.default, aten.lift.default),
    *(aten.to.dtype, aten.to.device, aten.to.dtype_layout, private_aten_op("to_copy")),
    *overloads("pin_memory", "_pin_memory"),
)
def shard_copy(call: OpCall) -> Iterator[Strategy]:
    """Every dim, and partial where the cast is exact for partial values."""
    yield from shard_dims(call, "self", shardable_dims(call.tensor("self")))
    before, after = call.tensor("self").dtype, call.outputs[0].dtype
    for reduction in reductions_of(before):
        if reduction not in reductions_of(after):
            continue
        # Casts preserve order, so maxima stay valid; a sum of rounded terms is not the rounded sum.
        if reduction != "sum" or torch.promote_types(before, after) == after:
            yield partial_strategy(call, "self", reduction=reduction)


@rule(aten.type_as.default, aten.to.other)
def shard_cast_like(call: OpCall) -> Iterator[Strategy]:
    """As shard_copy. Only the dtype of the second tensor matters, so it may have any placement."""
    for strategy in shard_copy(call):
        yield from with_any_placement(call, strategy, "other")


@rule(aten.view_as_real.default, aten.view_as_complex.default)
def shard_complex_view(call: OpCall) -> Iterator[Strategy]:
    """Every dim but the real view's last, which holds the real and the imaginary part."""
    num_dims = min(call.tensor("self").num_dims, call.outputs[0].num_dims)
    dims = [dim for dim in shardable_dims(call.tensor("self")) if dim < num_dims]
    yield from shard_dims(call, "self", dims)
    yield partial_strategy(call, "self")


@rule(aten.copy.default)
def shard_overwrite(call: OpCall) -> Iterator[Strategy]:
    """Every dim. Of the overwritten tensor only the shape and dtype matter."""
    for dim, placements in broadcast_shards(call, call.outputs[0].shape):
        yield make_strategy(call, {**placements, "self": Shard(dim)}, Shard(dim))
    source_dtype, target = call.tensor("src").dtype, call.outputs[0].dtype
    if source_dtype != torch.bool and torch.promote_types(source_dtype, target) == target:
        yield partial_strategy(call, "src")
        yield partial_strategy(call, "self", "src")


_NEW = (
    aten.new_zeros.default,
    aten.new_ones.default,
    aten.new_full.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
)
_LIKE = (
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.full_like.default,
    aten.empty_like.default,
)


@rule(*_NEW)
def shard_new(call: OpCall) -> Iterator[Strategy]:
    """Only the dtype and device of the tensor matter, so it may have any placement."""
    yield make_strategy(
        call,
        {"self": call.placement_of("self")},
        Replicate(),
        is_permutation_invariant=False,
    )


@rule(*_LIKE)
def shard_like(call: OpCall) -> Iterator[Strategy]:
    """Results are sharded like the tensor; if that is partial, they are replicated."""
    yield from shard_dims(call, "self", range(call.tensor("self").num_dims))
    if isinstance(call.placement_of("self"), Partial):
        yield make_strategy(call, {"self": call.placement_of("self")}, Replicate())


@rule(aten.broadcast_tensors.default)
def shard_broadcast(call: OpCall) -> Iterator[Strategy]:
    """All results are sharded along the dim, as are the tensors that are not broadcast along it."""
    output = call.outputs[0]
    for dim in shardable_dims(output):
        placements = [broadcast_shard(spec, output.shape, dim) for spec in call.inputs]
        yield make_strategy(call, {"tensors": placements}, Shard(dim))
    yield from propagate_partial(call, "tensors")
