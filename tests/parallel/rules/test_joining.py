"""Concatenated tensors are sharded equally, partial together, or become blocks of the
result's dim.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rule_proving import numbers, prove_strategies, stable_id, without_blocks
from shardscope.plan.placements import Shard

aten = torch.ops.aten


@pytest.mark.parametrize(
    "op", [aten.cat.default, aten.concat.default, aten.concatenate.default], ids=stable_id
)
def test_all_tensors_are_sharded_along_dims_that_are_not_concatenated(op: Any) -> None:
    strategies = prove_strategies(op, [numbers(4, 6), numbers(4, 3)], -1, sizes=[3])
    assert without_blocks(strategies) == {"S(0) S(0) -> S(0)", "P P -> P"}


def test_tensors_sharded_along_the_cat_dim_become_blocks() -> None:
    strategies = prove_strategies(
        aten.cat.default, [numbers(3, 8), numbers(3, 4), numbers(3, 4)], 1
    )
    assert "S(1) S(1) S(1) -> S(1, (8, 4, 4))" in strategies
    assert "S(0) S(0) -> S(0, 2x)" in prove_strategies(aten.cat.default, [numbers(4), numbers(4)])


def test_blocks_are_concatenated_to_blocks() -> None:
    candidate_placements = [(Shard(0, 2), Shard(0)), (Shard(0, 2), Shard(0, 2))]
    strategies = prove_strategies(
        aten.cat.default, [numbers(8), numbers(8)], candidate_placements=candidate_placements
    )
    assert "S(0, 2x) S(0) -> S(0, (4, 4, 8))" in strategies
    assert "S(0, 2x) S(0, 2x) -> S(0, 4x)" in strategies


def test_blocks_that_do_not_divide_are_not_sharded() -> None:
    assert not any(
        "S(1)" in strategy
        for strategy in prove_strategies(aten.cat.default, [numbers(3, 8), numbers(3, 3)], 1)
    )


def test_empty_vectors_that_torch_skips_stay_replicated() -> None:
    empty = torch.empty(0, dtype=torch.float64)
    assert "R S(1) -> S(1)" in prove_strategies(aten.cat.default, [empty, numbers(4, 6)], 0)


def test_partial_sums_are_concatenated_with_partial_sums_only() -> None:
    assert not any(
        "P R" in strategy
        for strategy in prove_strategies(aten.cat.default, [numbers(2), numbers(2)])
    )
    assert "P P -> P" not in prove_strategies(aten.cat.default, [numbers(4) > 0, numbers(4) > 0])


@pytest.mark.parametrize(
    ("dim", "expected"),
    [
        (0, {"S(0) S(0) -> S(1)", "S(1) S(1) -> S(2)"}),
        (1, {"S(0) S(0) -> S(0)", "S(1) S(1) -> S(2)"}),
        (-1, {"S(0) S(0) -> S(0)", "S(1) S(1) -> S(1)"}),
    ],
)
def test_stack_shifts_dims_after_the_new_dim(dim: int, expected: set[str]) -> None:
    strategies = prove_strategies(
        aten.stack.default, [numbers(4, 6), numbers(4, 6)], dim, sizes=[3]
    )
    assert without_blocks(strategies) == {*expected, "P P -> P"}


def test_hstack_and_vstack_are_sharded_like_cat() -> None:
    flat = [numbers(4), numbers(4)]
    square = [numbers(4, 6), numbers(4, 6)]
    assert "S(0) S(0) -> S(0, 2x)" in prove_strategies(aten.hstack.default, flat)
    assert "S(1) S(1) -> S(1, 2x)" in prove_strategies(aten.hstack.default, square)
    assert "S(0) S(0) -> S(1)" in prove_strategies(aten.vstack.default, flat)
    assert "S(0) S(0) -> S(0, 2x)" in prove_strategies(aten.vstack.default, square)
    assert prove_strategies(aten.vstack.default, [numbers(6), numbers(4, 6)]) == set()
