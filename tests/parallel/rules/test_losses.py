"""Elementwise losses are sharded along any dim; means are weighted by the sizes of shards."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rule_proving import numbers, positives, prove_strategies, stable_id, without_blocks

aten = torch.ops.aten
NONE, MEAN, SUM = 0, 1, 2
RESULT = {NONE: "S({0})", MEAN: "P", SUM: "P"}

LOSSES = [
    (aten.mse_loss.default, {}),
    (aten.l1_loss.default, {}),
    (aten.smooth_l1_loss.default, {"beta": 0.5}),
    (aten.huber_loss.default, {"delta": 0.5}),
    (aten.soft_margin_loss.default, {}),
    (aten.kl_div.default, {"log_target": True}),
]


@pytest.mark.parametrize(("op", "kwargs"), LOSSES, ids=stable_id)
@pytest.mark.parametrize("reduction", RESULT)
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_every_dim_may_be_sharded(
    op: Any, kwargs: dict[str, Any], reduction: int, num_ranks: int
) -> None:
    kwargs = {**kwargs, "reduction": reduction}
    strategies = prove_strategies(
        *(op, numbers(4, 3), numbers(4, 3)), kwargs=kwargs, sizes=[num_ranks], constants=["target"]
    )
    assert without_blocks(strategies) == {
        f"S({dim}) S({dim}) -> {RESULT[reduction].format(dim)}" for dim in range(2)
    }


@pytest.mark.parametrize("reduction", RESULT)
def test_weights_that_broadcast_stay_replicated(reduction: int) -> None:
    result = RESULT[reduction].format(0)
    strategies = prove_strategies(
        *(aten.binary_cross_entropy_with_logits.default, numbers(4, 3), positives(4, 3)),
        *(numbers(3), numbers(4, 1), reduction),
        constants=["weight", "pos_weight"],
    )
    assert f"S(0) S(0) R S(0) -> {result}" in strategies
    strategies = prove_strategies(
        *(aten.binary_cross_entropy.default, numbers(4, 3).sigmoid(), numbers(4, 3).sigmoid()),
        *(numbers(4, 3), reduction),
        constants=["weight"],
    )
    assert f"S(0) S(0) S(0) -> {result}" in strategies


def test_means_of_uneven_shards_are_weighted_by_size() -> None:
    args = (numbers(4, 3), numbers(4, 3), MEAN)
    assert "S(0) S(0) -> P" in prove_strategies(aten.mse_loss.default, *args, sizes=[3])
    strategies = prove_strategies(aten.mse_loss.default, *args, sizes=[2, 3])
    assert {"S(0) S(0) -> P; S(1) S(1) -> P", "S(0) S(0) -> P; S(0) S(0) -> P"} <= strategies


def test_a_mean_of_small_numbers_does_not_overflow_on_the_way() -> None:
    much = torch.full((64, 64), 200.0, dtype=torch.float16)
    strategies = prove_strategies(aten.mse_loss.default, much, torch.zeros_like(much), MEAN)
    assert "S(0) S(0) -> P" in strategies
