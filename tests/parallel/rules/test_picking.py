"""Gather and index_select are sharded along the source or the indices."""

from __future__ import annotations

import pytest
import torch

from rule_proving import numbers, prove_strategies, without_blocks

aten = torch.ops.aten
GATHER, TAKE, PICK = aten.gather.default, aten.take_along_dim.default, aten.index_select.default


def indices(below: int, *shape: int) -> torch.Tensor:
    return torch.randint(below, shape)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_gather_is_sharded_along_other_dims_indices_and_the_indexed_dim(
    num_ranks: int,
) -> None:
    strategies = prove_strategies(GATHER, numbers(3, 7), -1, indices(7, 3, 2), sizes=[num_ranks])
    assert without_blocks(strategies) == {
        *("S(0) S(0) -> S(0)", "R S(1) -> S(1)", "S(1) R -> P", "P R -> P"),
    }


def test_gather_does_not_shard_dims_of_different_sizes() -> None:
    strategies = prove_strategies(GATHER, numbers(4, 6), 1, indices(6, 2, 3))
    assert not any(strategy.startswith("S(0) S(0)") for strategy in strategies)


def test_a_rank_with_an_empty_shard_selects_zeros() -> None:
    assert "S(0) R -> P" in prove_strategies(GATHER, numbers(4), 0, indices(4, 2), sizes=[3])
    assert "S(0) R -> P" in prove_strategies(PICK, numbers(4, 3), 0, indices(4, 2), sizes=[3])


def test_bools_and_results_larger_than_the_source_are_not_partial() -> None:
    assert "S(0) R -> P" not in prove_strategies(GATHER, numbers(8) > 0, 0, indices(8, 2))
    assert "S(0) R -> P" not in prove_strategies(PICK, numbers(4), 0, indices(4, 9))


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_selecting_by_a_vector_of_indices(num_ranks: int) -> None:
    strategies = prove_strategies(PICK, numbers(3, 7, 2), -2, indices(7, 3), sizes=[num_ranks])
    assert without_blocks(strategies) == {
        *("S(0) R -> S(0)", "S(2) R -> S(2)", "R S(0) -> S(1)", "S(1) R -> P", "P R -> P"),
    }


def test_two_axes_shard_the_same_or_different_dims() -> None:
    strategies = prove_strategies(PICK, numbers(16, 2), 0, indices(8, 3), sizes=[2, 2])
    assert {"S(0) R -> P; S(0) R -> P", "S(0) R -> P; S(1) R -> S(1)"} <= strategies
    strategies = prove_strategies(GATHER, numbers(16, 2), 0, indices(8, 2, 2), sizes=[2, 2])
    assert {"S(0) R -> P; S(0) R -> P", "S(0) R -> P; S(1) S(1) -> S(1)"} <= strategies


def test_take_along_dim_broadcasts_the_other_dims() -> None:
    strategies = prove_strategies(TAKE, numbers(4, 3, 7), indices(7, 1, 3, 2), -1)
    assert {"S(0) R -> S(0)", "S(1) S(1) -> S(1)", "R S(2) -> S(2)", "S(2) R -> P"} <= strategies
    assert "R S(0) -> S(0)" in prove_strategies(TAKE, numbers(1, 3), indices(3, 4, 2), 1)
    assert prove_strategies(TAKE, numbers(4, 3), indices(12, 5)) == set()


def test_gather_of_a_scalar_is_partial_or_replicated() -> None:
    assert prove_strategies(GATHER, numbers(), 0, torch.tensor(0)) == {"P R -> P"}
