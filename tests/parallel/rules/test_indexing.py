"""Indexing by tensors: dims that no index touches pass, indices and what they pick from are cut."""

from __future__ import annotations

import pytest
import torch

from rule_proving import claims, numbers, plain

aten = torch.ops.aten
READ, WRITE = aten.index.Tensor, aten.index_put.default


def indices(below: int, *shape: int) -> torch.Tensor:
    return torch.randint(below, shape)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_one_index_reads_like_a_selection(num_ranks: int) -> None:
    found = claims(READ, numbers(3, 7, 2), [None, indices(7, 3)], sizes=[num_ranks])
    assert plain(found) == {
        *("S(0) R -> S(0)", "S(2) R -> S(2)", "R S(0) -> S(1)", "S(1) R -> P", "P R -> P"),
    }


def test_indices_that_stand_apart_bring_their_dims_to_the_front() -> None:
    found = claims(READ, numbers(4, 3, 6), [indices(4, 2), None, indices(6, 2)])
    assert plain(found) == {
        *("S(1) R R -> S(1)", "R S(0) S(0) -> S(0)", "P R R -> P"),
        *("S(0) R R -> P", "S(2) R R -> P"),
    }


def test_indices_that_broadcast_are_cut_where_they_are_not_of_one() -> None:
    found = claims(READ, numbers(6, 7, 3), [indices(6, 3, 1), indices(7, 2)])
    assert {"R S(0) R -> S(0)", "R R S(0) -> S(1)", "S(2) R R -> S(2)"} <= found


def test_indices_from_the_end_find_the_rank_that_has_them() -> None:
    for num_ranks in (2, 3):
        found = claims(READ, numbers(7, 2), [indices(7, 3) - 7], sizes=[num_ranks])
        assert "S(0) R -> P" in found


def test_both_dims_that_are_picked_from_may_be_cut_by_two_axes() -> None:
    found = claims(READ, numbers(4, 6), [indices(4, 3), indices(6, 3)], sizes=[2, 3])
    assert {"S(0) R R -> P; S(1) R R -> P", "S(1) R R -> P; S(0) R R -> P"} <= found


def test_what_a_mask_picks_is_known_only_later() -> None:
    found = claims(READ, numbers(4, 3, 6), [numbers(4, 3) > 0])
    assert plain(found) == {"S(2) R -> S(1)", "P R -> P"}


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_values_are_written_along_dims_that_no_index_touches(num_ranks: int) -> None:
    cache, positions = numbers(4, 3, 7, 2), torch.tensor([1, 5])
    new = numbers(4, 3, 2, 2)
    found = claims(WRITE, cache, [None, None, positions], new, sizes=[num_ranks])
    assert plain(found) == {
        *("S(0) R S(0) -> S(0)", "S(1) R S(1) -> S(1)", "S(3) R S(3) -> S(3)", "P R P -> P"),
    }


def test_values_that_are_broadcast_stay_whole() -> None:
    positions = torch.tensor([1, 2])
    found = claims(WRITE, numbers(4, 6, 3), [None, positions], numbers(3))
    assert {"S(0) R R -> S(0)", "S(2) R S(0) -> S(2)"} <= found


def test_what_is_added_up_may_be_added_by_different_ranks() -> None:
    for target in ("R", "P"):
        found = claims(WRITE, numbers(4, 3), [indices(4, 6)], numbers(6, 3), True, sizes=[3])
        assert f"{target} S(0) S(0) -> P" in found
    found = claims(WRITE, numbers(4, 3), [indices(4, 6)], numbers(6, 3), True, sizes=[2, 2])
    assert "R S(0) S(0) -> P; S(1) R S(1) -> S(1)" in found
    assert "R S(0) S(0) -> P; R S(0) S(0) -> P" in found
    assert not any(
        "-> P" in one and "S(0) S(0)" in one
        for one in claims(WRITE, numbers(4, 3), [torch.tensor([1, 2])], numbers(2, 3))
    )


def test_one_number_is_written_wherever_a_mask_says() -> None:
    number = numbers(1)[0]
    found = claims(WRITE, numbers(4, 6, 3), [numbers(4, 6) > 0], number, sizes=[3])
    assert {"S(0) S(0) R -> S(0)", "S(1) S(1) R -> S(1)", "S(2) R R -> S(2)"} <= found
    assert claims(WRITE, numbers(4, 3), [torch.tensor([True, False] * 2)], numbers(2, 3)) == set()
