"""Indexing by tensors is sharded along untouched dims, along the indices and along indexed dims."""

from __future__ import annotations

import pytest
import torch

from rule_proving import numbers, prove_strategies, without_blocks

aten = torch.ops.aten
READ, WRITE = aten.index.Tensor, aten.index_put.default


def indices(below: int, *shape: int) -> torch.Tensor:
    return torch.randint(below, shape)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_single_index_tensor_is_sharded_like_index_select(num_ranks: int) -> None:
    strategies = prove_strategies(READ, numbers(3, 7, 2), [None, indices(7, 3)], sizes=[num_ranks])
    assert without_blocks(strategies) == {
        *("S(0) R -> S(0)", "S(2) R -> S(2)", "R S(0) -> S(1)", "S(1) R -> P", "P R -> P"),
    }


def test_index_dims_of_separated_indices_come_first() -> None:
    strategies = prove_strategies(READ, numbers(4, 3, 6), [indices(4, 2), None, indices(6, 2)])
    assert without_blocks(strategies) == {
        *("S(1) R R -> S(1)", "R S(0) S(0) -> S(0)", "P R R -> P"),
        *("S(0) R R -> P", "S(2) R R -> P"),
    }


def test_indices_are_sharded_along_dims_that_are_not_broadcast() -> None:
    strategies = prove_strategies(READ, numbers(6, 7, 3), [indices(6, 3, 1), indices(7, 2)])
    assert {"R S(0) R -> S(0)", "R R S(0) -> S(1)", "S(2) R R -> S(2)"} <= strategies


def test_indices_from_the_end_find_the_rank_that_has_them() -> None:
    for num_ranks in (2, 3):
        strategies = prove_strategies(READ, numbers(7, 2), [indices(7, 3) - 7], sizes=[num_ranks])
        assert "S(0) R -> P" in strategies


def test_two_axes_may_shard_both_indexed_dims() -> None:
    strategies = prove_strategies(READ, numbers(4, 6), [indices(4, 3), indices(6, 3)], sizes=[2, 3])
    assert {"S(0) R R -> P; S(1) R R -> P", "S(1) R R -> P; S(0) R R -> P"} <= strategies


def test_mask_indices_are_not_sharded() -> None:
    strategies = prove_strategies(READ, numbers(4, 3, 6), [numbers(4, 3) > 0])
    assert without_blocks(strategies) == {"S(2) R -> S(1)", "P R -> P"}


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_values_are_written_along_dims_that_no_index_touches(num_ranks: int) -> None:
    cache, positions = numbers(4, 3, 7, 2), torch.tensor([1, 5])
    new = numbers(4, 3, 2, 2)
    strategies = prove_strategies(WRITE, cache, [None, None, positions], new, sizes=[num_ranks])
    assert without_blocks(strategies) == {
        *("S(0) R S(0) -> S(0)", "S(1) R S(1) -> S(1)", "S(3) R S(3) -> S(3)", "P R P -> P"),
    }


def test_values_that_are_broadcast_stay_replicated() -> None:
    positions = torch.tensor([1, 2])
    strategies = prove_strategies(WRITE, numbers(4, 6, 3), [None, positions], numbers(3))
    assert {"S(0) R R -> S(0)", "S(2) R S(0) -> S(2)"} <= strategies


def test_accumulated_values_may_be_added_by_different_ranks() -> None:
    for target in ("R", "P"):
        strategies = prove_strategies(
            WRITE, numbers(4, 3), [indices(4, 6)], numbers(6, 3), True, sizes=[3]
        )
        assert f"{target} S(0) S(0) -> P" in strategies
    strategies = prove_strategies(
        WRITE, numbers(4, 3), [indices(4, 6)], numbers(6, 3), True, sizes=[2, 2]
    )
    assert "R S(0) S(0) -> P; S(1) R S(1) -> S(1)" in strategies
    assert "R S(0) S(0) -> P; R S(0) S(0) -> P" in strategies
    assert not any(
        "-> P" in strategy and "S(0) S(0)" in strategy
        for strategy in prove_strategies(
            WRITE, numbers(4, 3), [torch.tensor([1, 2])], numbers(2, 3)
        )
    )


def test_a_scalar_is_written_where_a_sharded_mask_is_true() -> None:
    number = numbers(1)[0]
    strategies = prove_strategies(WRITE, numbers(4, 6, 3), [numbers(4, 6) > 0], number, sizes=[3])
    assert {"S(0) S(0) R -> S(0)", "S(1) S(1) R -> S(1)", "S(2) R R -> S(2)"} <= strategies
    assert (
        prove_strategies(WRITE, numbers(4, 3), [torch.tensor([True, False] * 2)], numbers(2, 3))
        == set()
    )
