"""Expand and repeat keep shards, and each rank creates its shard of new dims."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rule_proving import numbers, prove_strategies, stable_id
from shardscope.plan.placements import Shard

aten = torch.ops.aten


@pytest.mark.parametrize("op", [aten.expand.default, aten.broadcast_to.default], ids=stable_id)
def test_expand_creates_only_the_ranks_shard(op: Any) -> None:
    strategies = prove_strategies(op, numbers(4, 1, 5), [6, 4, 2, 5])
    assert {"S(0) -> S(1)", "S(2) -> S(3)", "R -> S(0)", "R -> S(2)", "P -> P"} <= strategies
    assert not any(strategy.startswith("S(1)") for strategy in strategies)
    strategies_of_column = prove_strategies(aten.expand.default, numbers(4, 1), [-1, 6])
    assert {"S(0) -> S(0)", "R -> S(1)"} <= strategies_of_column


def test_expanding_on_two_axes() -> None:
    strategies = prove_strategies(aten.expand.default, numbers(4, 1), [8, 4, 6], sizes=[2, 2])
    assert {"R -> S(0); R -> S(0)", "R -> S(2); S(0) -> S(1)", "S(0) -> S(1); R -> R"} <= strategies


def test_expand_as_reads_only_the_shape() -> None:
    strategies = prove_strategies(
        aten.expand_as.default,
        numbers(1, 4),
        numbers(6, 4),
        candidate_placements=[(Shard(1), Shard(0))],
    )
    assert {"R R -> S(0)", "S(1) R -> S(1)", "S(1) S(0) -> S(1)"} <= strategies


@pytest.mark.parametrize(
    ("op", "args"),
    [(aten.repeat.default, [3, 1, 2]), (aten.tile.default, [3, 1, 2])],
    ids=stable_id,
)
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_repeated_dim_becomes_blocks(op: Any, args: Any, num_ranks: int) -> None:
    strategies = prove_strategies(op, numbers(6, 6), args, sizes=[num_ranks])
    assert {"S(0) -> S(1)", "S(1) -> S(2, 2x)", "P -> P"} <= strategies
    assert "S(1, (2, 2, 2)) -> S(2, (2, 2, 2, 2, 2, 2))" in strategies or num_ranks == 3
    assert ("R -> S(0)" in strategies) == (num_ranks in (2, 3))


def test_repeating_on_two_axes() -> None:
    strategies = prove_strategies(aten.repeat.default, numbers(4, 1), [2, 4], sizes=[2, 2])
    assert {"S(0) -> S(0, 2x); R -> S(1)", "R -> S(1); R -> S(1)"} <= strategies
    assert "S(0) -> S(0, 2x); S(0) -> S(0, 2x)" in strategies


def test_tiling_with_fewer_counts_than_dims() -> None:
    assert "S(0) -> S(0)" in prove_strategies(aten.tile.default, numbers(4, 3), [2])


@pytest.mark.parametrize("dim", [1, -2])
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_repeat_interleave_makes_shards_longer(dim: int, num_ranks: int) -> None:
    strategies = prove_strategies(
        aten.repeat_interleave.self_int,
        *(numbers(3, 6, 2), 2, dim),
        kwargs={"output_size": 12},
        sizes=[num_ranks],
    )
    assert {"S(0) -> S(0)", "S(1) -> S(1)", "P -> P"} <= strategies
    assert "S(1, 3x) -> S(1, 3x)" in strategies or num_ranks == 3


def test_repeat_interleave_without_a_dim_is_not_sharded() -> None:
    strategies = prove_strategies(aten.repeat_interleave.self_int, numbers(4, 6), 2)
    assert not any("S" in strategy for strategy in strategies)
    assert "S(0) -> S(0)" in prove_strategies(aten.repeat_interleave.self_int, numbers(4), 2)
