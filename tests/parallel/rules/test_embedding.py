"""Tables of vectors are cut by what is looked up, by columns, or by rows."""

from __future__ import annotations

import pytest
import torch

from rule_proving import claims, numbers, plain

aten = torch.ops.aten
EMBEDDING = aten.embedding.default
INDICES = torch.tensor([[0, 9, 3, 3], [5, 1, 3, 8], [9, 0, 2, 7]])


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_table_is_cut_by_columns_and_rows_and_what_is_looked_up(num_ranks: int) -> None:
    found = claims(EMBEDDING, numbers(10, 6), INDICES, sizes=[num_ranks])
    assert plain(found) == {
        *("S(1) R -> S(2)", "S(0) R -> P", "P R -> P", "R S(0) -> S(0)", "R S(1) -> S(1)"),
    }


@pytest.mark.parametrize("padding", [-1, 0, 3, 9])
def test_rows_are_cut_whichever_of_them_has_no_gradient(padding: int) -> None:
    for num_ranks in (2, 3):
        assert "S(0) R -> P" in claims(
            EMBEDDING, numbers(10, 6), INDICES, padding, sizes=[num_ranks]
        )


def test_a_rank_without_rows_gives_zeros() -> None:
    assert "S(0) R -> P" in claims(EMBEDDING, numbers(4, 2), INDICES % 4, 1, sizes=[3])


def test_several_axes_share_rows_columns_and_indices() -> None:
    found = claims(EMBEDDING, numbers(8, 2), INDICES[:2] % 8, 1, sizes=[2, 2])
    assert "S(0) R -> P; S(0) R -> P" in found
    assert "S(0) R -> P; S(1) R -> S(2)" in found
    assert "S(0) R -> P; R S(0) -> S(0)" in found


def test_one_index_is_enough() -> None:
    assert "S(0) R -> P" in claims(EMBEDDING, numbers(10, 2), torch.tensor(7))


def test_gradients_by_frequency_need_all_indices_in_training() -> None:
    table, by_frequency = numbers(10, 6), (-1, True)
    found = claims(EMBEDDING, table, INDICES, *by_frequency)
    assert "S(1) R -> S(2)" in found  # and those of inference, which were proved so


def test_sparse_gradients_are_not_summed() -> None:
    assert claims(EMBEDDING, numbers(10, 6), INDICES, -1, False, True) == set()


@pytest.mark.parametrize("mode", [0, 1])
@pytest.mark.parametrize("op", [aten.embedding_bag.padding_idx, aten._embedding_bag.default])
def test_bags_are_cut_by_columns(op: torch._ops.OpOverload, mode: int) -> None:
    bags = (INDICES.flatten(), torch.tensor([0, 3, 8]))
    found = claims(op, numbers(10, 6), *bags, False, mode, False, None, False, 1)
    assert plain(found) == {"S(1) R R -> S(1) R R R"}


def test_weighted_bags_add_up_the_weights_gradients() -> None:
    bags = (INDICES.flatten(), torch.tensor([0, 3, 8]))
    found = claims(
        *(aten.embedding_bag.padding_idx, numbers(10, 6), *bags),
        *(False, 0, False, numbers(12), False, None),
    )
    assert plain(found) == {"S(1) R R R -> S(1) R R R"}


def test_maxima_say_where_they_were_found_so_such_bags_stay_whole() -> None:
    bags = (INDICES.flatten(), torch.tensor([0, 3, 8]))
    args = (False, 2, False, None, False, None)
    assert claims(aten.embedding_bag.padding_idx, numbers(10, 6), *bags, *args) == set()


def test_one_hot_is_cut_by_what_it_encodes_unless_it_counts_the_classes_itself() -> None:
    found = claims(aten.one_hot.default, INDICES, 10, sizes=[3])
    assert plain(found) == {"S(0) -> S(0)", "S(1) -> S(1)"}
    assert claims(aten.one_hot.default, INDICES) == set()
