"""Softmax and layer norm are sharded along other dims, and decomposed along their own."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rule_proof import refute
from rule_proving import numbers, prove_strategies, stable_id
from rule_sample import make_sample
from shardscope.parallel.ir.graph import Strategy
from shardscope.plan.placements import Shard

aten = torch.ops.aten
SOFTMAXES = [
    (aten.softmax.int, ()),
    (aten.log_softmax.int, ()),
    (aten._softmax.default, (False,)),
    (aten._log_softmax.default, (False,)),
    (aten.special_softmax.default, ()),
    (aten._safe_softmax.default, ()),
]


@pytest.mark.parametrize(("op", "more"), SOFTMAXES, ids=stable_id)
@pytest.mark.parametrize("dim", [1, -2])
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_softmax_does_not_shard_its_dim(
    op: Any, more: tuple[Any, ...], dim: int, num_ranks: int
) -> None:
    strategies = prove_strategies(op, numbers(4, 6, 5), dim, *more, sizes=[num_ranks])
    assert {"S(0) -> S(0)", "S(2) -> S(2)"} <= strategies
    assert not any(strategy.startswith("S(1") or "P" in strategy for strategy in strategies)


@pytest.mark.parametrize(("op", "more"), SOFTMAXES, ids=stable_id)
def test_softmax_along_a_sharded_dim_is_refuted(op: Any, more: tuple[Any, ...]) -> None:
    wrong = Strategy((Shard(1),), (Shard(1),))
    sample = make_sample(op, [numbers(4, 6), 1, *more])
    assert refute(sample, [wrong], sizes=[2]) is not None


@pytest.mark.parametrize("sizes", [[2], [3], [2, 2]], ids=stable_id)
def test_layer_norm_is_sharded_along_the_leading_dims(sizes: list[int]) -> None:
    tensor, weight, bias = numbers(4, 8, 6), numbers(6), numbers(6)
    zeroth = "; ".join(["S(0) R R -> S(0)", "S(1) R R -> S(1)"][: len(sizes)])
    strategies = prove_strategies(aten.layer_norm.default, tensor, [6], weight, bias, sizes=sizes)
    assert zeroth in strategies
    assert not any("S(2" in strategy for strategy in strategies)


def test_every_result_of_a_norm_is_sharded() -> None:
    tensor, weight, bias = numbers(4, 5, 6), numbers(5, 6), numbers(5, 6)
    strategies = prove_strategies(
        aten.native_layer_norm.default, tensor, [5, 6], weight, bias, 1e-5
    )
    assert "S(0) R R -> S(0) S(0) S(0)" in strategies
    assert not any("S(1" in strategy for strategy in strategies)
    rms = prove_strategies(aten._fused_rms_norm.default, numbers(4, 5, 6), [6], numbers(6), 1e-5)
    assert {"S(0) R -> S(0) S(0)", "S(1) R -> S(1) S(1)"} <= rms
    assert "S(1) -> S(1)" in prove_strategies(aten.rms_norm.default, numbers(4, 5, 6), [6])


def test_a_norm_without_weights_is_sharded_too() -> None:
    assert "S(0) -> S(0)" in prove_strategies(aten.layer_norm.default, numbers(4, 6), [6])
    strategies = prove_strategies(aten.layer_norm.default, numbers(4, 6), [6], None, numbers(6))
    assert "S(0) R -> S(0)" in strategies
