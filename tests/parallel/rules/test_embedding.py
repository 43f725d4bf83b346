"""Embeddings are sharded by indices, by columns or by rows."""

from __future__ import annotations

import pytest
import torch

from rule_proving import numbers, prove_strategies, without_blocks

aten = torch.ops.aten
EMBEDDING = aten.embedding.default
INDICES = torch.tensor([[0, 9, 3, 3], [5, 1, 3, 8], [9, 0, 2, 7]])


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_embeddings_are_sharded_by_columns_rows_and_indices(num_ranks: int) -> None:
    strategies = prove_strategies(EMBEDDING, numbers(10, 6), INDICES, sizes=[num_ranks])
    assert without_blocks(strategies) == {
        *("S(1) R -> S(2)", "S(0) R -> P", "P R -> P", "R S(0) -> S(0)", "R S(1) -> S(1)"),
    }


@pytest.mark.parametrize("padding", [-1, 0, 3, 9])
def test_rows_are_sharded_for_any_padding_index(padding: int) -> None:
    for num_ranks in (2, 3):
        assert "S(0) R -> P" in prove_strategies(
            EMBEDDING, numbers(10, 6), INDICES, padding, sizes=[num_ranks]
        )


def test_a_rank_without_rows_gives_zeros() -> None:
    assert "S(0) R -> P" in prove_strategies(EMBEDDING, numbers(4, 2), INDICES % 4, 1, sizes=[3])


def test_several_axes_share_rows_columns_and_indices() -> None:
    strategies = prove_strategies(EMBEDDING, numbers(8, 2), INDICES[:2] % 8, 1, sizes=[2, 2])
    assert "S(0) R -> P; S(0) R -> P" in strategies
    assert "S(0) R -> P; S(1) R -> S(2)" in strategies
    assert "S(0) R -> P; R S(0) -> S(0)" in strategies


def test_a_scalar_index() -> None:
    assert "S(0) R -> P" in prove_strategies(EMBEDDING, numbers(10, 2), torch.tensor(7))


def test_gradients_by_frequency_need_all_indices_in_training() -> None:
    table, by_frequency = numbers(10, 6), (-1, True)
    strategies = prove_strategies(EMBEDDING, table, INDICES, *by_frequency)
    assert "S(1) R -> S(2)" in strategies  # and those of inference, which were proved so


def test_sparse_gradients_are_not_summed() -> None:
    assert prove_strategies(EMBEDDING, numbers(10, 6), INDICES, -1, False, True) == set()


@pytest.mark.parametrize("mode", [0, 1])
@pytest.mark.parametrize("op", [aten.embedding_bag.padding_idx, aten._embedding_bag.default])
def test_bags_are_sharded_by_columns(op: torch._ops.OpOverload, mode: int) -> None:
    bags = (INDICES.flatten(), torch.tensor([0, 3, 8]))
    strategies = prove_strategies(op, numbers(10, 6), *bags, False, mode, False, None, False, 1)
    assert without_blocks(strategies) == {"S(1) R R -> S(1) R R R"}


def test_weighted_bags_add_up_the_weights_gradients() -> None:
    bags = (INDICES.flatten(), torch.tensor([0, 3, 8]))
    strategies = prove_strategies(
        *(aten.embedding_bag.padding_idx, numbers(10, 6), *bags),
        *(False, 0, False, numbers(12), False, None),
    )
    assert without_blocks(strategies) == {"S(1) R R R -> S(1) R R R"}


def test_bags_of_maxima_are_not_sharded() -> None:
    bags = (INDICES.flatten(), torch.tensor([0, 3, 8]))
    args = (False, 2, False, None, False, None)
    assert prove_strategies(aten.embedding_bag.padding_idx, numbers(10, 6), *bags, *args) == set()


def test_onehot_is_sharded_by_indices_if_the_number_of_classes_is_given() -> None:
    strategies = prove_strategies(aten.one_hot.default, INDICES, 10, sizes=[3])
    assert without_blocks(strategies) == {"S(0) -> S(0)", "S(1) -> S(1)"}
    assert prove_strategies(aten.one_hot.default, INDICES) == set()
