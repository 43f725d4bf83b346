"""Random ops: every rank draws what the single device draws and keeps its shard."""

from __future__ import annotations

import math
from collections.abc import Iterator

import sympy
import torch
from torch import Tensor, fx

from shardscope._torch.export import expression_of
from shardscope.parallel.ir.graph import Strategy
from shardscope.parallel.sharding_rules.builders import (
    make_strategy,
    propagate_partial_sum,
    shard_dims,
)
from shardscope.parallel.sharding_rules.context import LoweringContext, OpCall, TensorSpec
from shardscope.parallel.sharding_rules.masking import slice_shard
from shardscope.parallel.sharding_rules.registry import decomposition, lowering, rule
from shardscope.plan.placements import Replicate

aten = torch.ops.aten


def is_random(op: object) -> bool:
    """Whether the op draws from a generator."""
    return torch.Tag.nondeterministic_seeded in getattr(op, "tags", ())


@rule(aten.dropout.default, aten.feature_dropout.default, aten.native_dropout.default)
def shard_dropout(call: OpCall) -> Iterator[Strategy]:
    """Every dim; also partial sums, since each rank multiplies by a mask that all ranks can
    compute.
    """
    yield from shard_dims(call, "input", range(call.tensor("input").num_dims))
    if len(call.outputs) == 1:
        yield from propagate_partial_sum(call, "input")


@lowering(aten.dropout.default, aten.feature_dropout.default)
def lower_dropout(local: LoweringContext) -> fx.Node:
    """The op applied to ones gives the scaled mask, of which the rank takes its shard."""
    if not local["train"]:
        return local.repeat()
    mask = slice_shard(
        local.builder,
        local.repeat(input=_write_ones(local)),
        spec=local.outputs[0],
        coordinate=local.coordinate,
    )
    return local.builder.write(aten.mul.Tensor, local["input"], mask)


@lowering(aten.native_dropout.default)
def lower_native_dropout(local: LoweringContext) -> tuple[fx.Node, ...]:
    results = local.repeat(input=_write_ones(local))
    factor, mask = (
        slice_shard(
            local.builder,
            local.builder.item(results, index),
            spec=spec,
            coordinate=local.coordinate,
        )
        for index, spec in enumerate(local.outputs)
    )
    return local.builder.write(aten.mul.Tensor, local["input"], factor), mask


def _write_ones(local: LoweringContext) -> fx.Node:
    return local.builder.write(aten.ones_like.default, make_full_tensor(local, "input"))


def make_full_tensor(local: LoweringContext, name: str) -> fx.Node:
    """An uninitialized tensor with the full argument's shape and memory order, which orders random
    draws.
    """
    spec: TensorSpec = local.call[name]
    order = spec.memory_order or tuple(range(spec.num_dims))
    shape = [local.builder.size(spec.shape[dim]) for dim in order]
    full_tensor = local.builder.write(aten.new_empty.default, local[name], shape)
    if list(order) == sorted(order):
        return full_tensor
    return local.builder.write(
        aten.permute.default, full_tensor, [order.index(dim) for dim in sorted(order)]
    )


_RANDOM_LIKE = (
    aten.rand_like.default,
    aten.randn_like.default,
    aten.randint_like.default,
    aten.randint_like.low_dtype,
    aten.bernoulli.p,
    aten.normal_functional.default,
    aten.uniform.default,
    aten.exponential.default,
    aten.geometric.default,
    aten.cauchy.default,
    aten.log_normal.default,
    aten.random.default,
    aten.random.to,
)


@rule(*_RANDOM_LIKE)
def shard_random_like(call: OpCall) -> Iterator[Strategy]:
    """Only the shape and dtype of the tensor matter."""
    placement = call.placement_of("self")
    yield from shard_dims(call, "self", range(call.tensor("self").num_dims))
    if placement != Replicate():
        yield make_strategy(call, {"self": placement}, Replicate(), is_permutation_invariant=False)


@lowering(*_RANDOM_LIKE)
def lower_random_like(local: LoweringContext) -> fx.Node:
    full_tensor = make_full_tensor(local, "self")
    return slice_shard(
        local.builder,
        local.repeat(self=full_tensor),
        spec=local.outputs[0],
        coordinate=local.coordinate,
    )


@rule(aten.rrelu.default)
def shard_rrelu(call: OpCall) -> Iterator[Strategy]:
    """Only in evaluation: torch tags it as pointwise, but in training its slopes are random."""
    if not call["training"]:
        yield from shard_dims(call, "self", range(call.tensor("self").num_dims))


@decomposition(aten.alpha_dropout.default)
def decompose_alpha_dropout(input: Tensor, p: float, train: bool) -> Tensor:
    """Dropped values become a constant; the result is scaled to preserve mean and variance."""
    if not train or p in (0, 1) or input.device.type not in ("cpu", "meta"):
        raise NotImplementedError  # on other devices dropout draws differently from this op
    dropped = 1.7580993408473766  # the negated limit of SELU
    scale = 1 / math.sqrt((dropped * dropped * p + 1) * (1 - p))
    keep_mask: Tensor = (aten.dropout(torch.ones_like(input), p, True) != 0).to(input.dtype)
    shift = (keep_mask - 1) * dropped * scale + dropped * scale * p
    return input * (keep_mask * scale) + shift


def memory_order(tensor: Tensor) -> tuple[int, ...]:
    """The tensor's dims from slowest to fastest in memory, as empty_like would order them."""
    strides = [expression_of(stride) for stride in torch.empty_like(tensor).stride()]
    return tuple(
        sorted(range(tensor.dim()), key=lambda dim: -_stride_at_sample_sizes(strides[dim]))
    )


def _stride_at_sample_sizes(stride: int | sympy.Expr) -> int:
    """A symbolic stride with every size 2. A stride is a product of sizes, so any sizes above 1
    give the same order.
    """
    if isinstance(stride, int):
        return stride
    return int(stride.subs(dict.fromkeys(stride.free_symbols, 2)))
