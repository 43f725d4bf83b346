"""Pointwise ops are sharded along any dim; only linear ops take partial inputs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rule_proving import numbers, positives, prove_strategies, stable_id
from shardscope.parallel.sharding_rules.pointwise import is_pointwise

aten = torch.ops.aten


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize(
    "op",
    [
        *(aten.relu.default, aten.gelu.default, aten.silu.default, aten.exp.default),
        *(aten.absolute.default, aten.hardswish.default, aten.log_sigmoid.default),
    ],
    ids=stable_id,
)
def test_a_nonlinear_unary_op_is_sharded_along_every_dim_and_not_partial(
    op: Any, num_ranks: int
) -> None:
    strategies = prove_strategies(op, numbers(4, 6, 5), sizes=[num_ranks])
    assert {"S(0) -> S(0)", "S(1) -> S(1)", "S(2) -> S(2)"} <= strategies
    assert not any("P" in strategy for strategy in strategies)


def test_inputs_broadcast_along_a_dim_stay_replicated() -> None:
    strategies = prove_strategies(aten.mul.Tensor, numbers(4, 1, 6), numbers(5, 1))
    assert strategies >= {
        "S(0) R -> S(0)",
        "R S(0) -> S(1)",
        "S(2) R -> S(2)",
        "P R -> P",
        "R P -> P",
    }
    assert not any("; " in strategy or "S(1) " in strategy for strategy in strategies)


def test_a_scalar_tensor_stays_replicated() -> None:
    strategies = prove_strategies(aten.add.Tensor, numbers(4), numbers())
    assert strategies == {"S(0) R -> S(0)", "P P -> P", "S(0, 2x) R -> S(0, 2x)"}


@pytest.mark.parametrize(
    ("op", "args", "expected"),
    [
        (aten.add.Tensor, (numbers(4), numbers(4)), {"P P -> P"}),
        (aten.add.Tensor, (numbers(4), 2.0), set()),
        (aten.add.Scalar, (numbers(4), 2.0), set()),
        (aten.sub.Tensor, (numbers(4), numbers(4)), {"P P -> P"}),
        (aten.rsub.Scalar, (numbers(4), 1), set()),
        (aten.rsub.Tensor, (numbers(4), numbers(4)), {"P P -> P"}),
        (aten.mul.Tensor, (numbers(4), numbers(4)), {"P R -> P", "R P -> P"}),
        (aten.mul.Tensor, (numbers(4), 3), {"P -> P"}),
        (aten.div.Tensor, (numbers(4), positives(4)), {"P R -> P"}),
        (aten.div.Scalar, (numbers(4), 3), {"P -> P"}),
        (aten.div.Tensor_mode, (numbers(4), positives(4)), {"P R -> P"}),
        (aten.neg.default, (numbers(4),), {"P -> P"}),
        (aten.where.self, (numbers(4) > 0, numbers(4), numbers(4)), {"R P P -> P"}),
        (aten.where.ScalarOther, (numbers(4) > 0, numbers(4), 0.0), {"R P -> P"}),
        (aten.where.ScalarOther, (numbers(4) > 0, numbers(4), 1.0), set()),
        (aten.where.ScalarSelf, (numbers(4) > 0, 0, numbers(4)), {"R P -> P"}),
        (aten.where.Scalar, (numbers(4) > 0, 0, 0), set()),
        (aten.masked_fill.Scalar, (numbers(4), numbers(4) > 0, 0), {"P R -> P"}),
        (aten.masked_fill.Scalar, (numbers(4), numbers(4) > 0, -1e9), set()),
        (aten.masked_fill.Tensor, (numbers(4), numbers(4) > 0, numbers()), {"P R P -> P"}),
        (aten.maximum.default, (numbers(4), numbers(4)), set()),
        (aten.pow.Tensor_Scalar, (positives(4), 2), set()),
        (aten.complex.default, (numbers(4), numbers(4)), {"P P -> P"}),
        (aten.polar.default, (positives(4), numbers(4)), set()),
        (aten.div.Tensor_mode, (numbers(4), positives(4), "floor"), set()),
    ],
    ids=lambda value: "" if isinstance(value, tuple) else stable_id(value),
)
def test_partial_sums_pass_through_linear_ops_only(
    op: Any, args: tuple[Any, ...], expected: set[str]
) -> None:
    kwargs = {}
    if op is aten.div.Tensor_mode:
        kwargs, args = {"rounding_mode": args[2] if len(args) > 2 else None}, args[:2]
    strategies = prove_strategies(op, *args, kwargs=kwargs)
    assert {strategy for strategy in strategies if "P" in strategy} == expected
    assert any("S(0)" in strategy for strategy in strategies)


def test_a_weight_for_each_channel_is_sharded_with_the_channels() -> None:
    strategies = prove_strategies(aten.prelu.default, numbers(2, 4, 6), numbers(4))
    assert {"S(0) R -> S(0)", "S(1) S(0) -> S(1)", "S(2) R -> S(2)"} <= strategies
    single_weight = prove_strategies(aten.prelu.default, numbers(2, 4), numbers(1))
    assert {"S(0) R -> S(0)", "S(1) R -> S(1)"} <= single_weight


def test_both_results_of_an_op_are_sharded() -> None:
    assert "S(1) -> S(1) S(1)" in prove_strategies(aten.frexp.Tensor, numbers(4, 6))


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_uneven_shards_are_proved_too(num_ranks: int) -> None:
    assert "S(0) S(0) -> S(0)" in prove_strategies(
        aten.mul.Tensor, numbers(5, 2), numbers(5, 2), sizes=[num_ranks]
    )


def test_two_axes_may_shard_the_same_or_different_dims() -> None:
    strategies = prove_strategies(aten.add.Tensor, numbers(4, 6), numbers(6), sizes=[2, 2])
    assert "S(1) S(0) -> S(1); S(1, 3x) S(0, 3x) -> S(1, 3x)" not in strategies
    assert "S(0) R -> S(0); S(1) S(0) -> S(1)" in strategies
    assert "S(0) R -> S(0); S(0) R -> S(0)" in strategies
    assert "P P -> P; S(1) S(0) -> S(1)" in strategies


@pytest.mark.parametrize(
    "op",
    [
        *(aten.bernoulli.default, aten.where.default, aten.relu_.default),
        *(aten.rand_like.default, aten.equal.default),
    ],
    ids=stable_id,
)
def test_random_mutating_and_reducing_ops_are_not_pointwise(op: Any) -> None:
    assert not is_pointwise(op)


def find_tagged_ops() -> list[Any]:
    packets = [getattr(aten, name) for name in dir(aten)]
    named = [packet for packet in packets if hasattr(packet, "overloads")]
    ops = [getattr(packet, kind) for packet in named for kind in packet.overloads()]
    return [op for op in ops if is_pointwise(op)]


def arguments_of(op: Any) -> dict[str, Any]:
    """Something to try an op with: tensors that broadcast, of numbers that most functions take."""
    shapes = iter([(2, 4), (4,), (1, 4), ()])
    arguments: dict[str, Any] = {}
    for slot in op._schema.arguments:
        if "Tensor" in str(slot.type):
            tensor = torch.rand(next(shapes), dtype=torch.float64) * 0.8 + 0.1
            is_mask = slot.name in ("mask", "condition")
            arguments[slot.name] = tensor > 0.5 if is_mask else tensor
        elif not slot.has_default_value():
            arguments[slot.name] = {"int": 2, "bool": True, "number": 0.5}.get(str(slot.type))
    return arguments


def test_every_op_that_torch_tags_as_pointwise_has_true_strategies() -> None:
    num_proved = 0
    for op in find_tagged_ops():
        arguments = arguments_of(op)
        try:
            op(**arguments)
        except (RuntimeError, TypeError, NotImplementedError):
            continue  # it wants integers, or more arguments
        prove_strategies(op, kwargs=arguments)
        num_proved += 1
    assert num_proved > 150
