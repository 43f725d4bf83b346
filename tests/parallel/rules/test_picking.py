"""Elements picked by indices: what is picked from, or the indices, may be cut."""

from __future__ import annotations

import pytest
import torch

from rule_proving import claims, numbers, plain

aten = torch.ops.aten
GATHER, TAKE, PICK = aten.gather.default, aten.take_along_dim.default, aten.index_select.default


def indices(below: int, *shape: int) -> torch.Tensor:
    return torch.randint(below, shape)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_gathering_is_cut_along_other_dims_along_indices_and_along_what_is_gathered_from(
    num_ranks: int,
) -> None:
    found = claims(GATHER, numbers(3, 7), -1, indices(7, 3, 2), sizes=[num_ranks])
    assert plain(found) == {
        *("S(0) S(0) -> S(0)", "R S(1) -> S(1)", "S(1) R -> P", "P R -> P"),
    }


def test_rows_that_no_index_reaches_cannot_be_cut() -> None:
    found = claims(GATHER, numbers(4, 6), 1, indices(6, 2, 3))
    assert not any(one.startswith("S(0) S(0)") for one in found)


def test_a_rank_that_holds_nothing_picks_nothing() -> None:
    assert "S(0) R -> P" in claims(GATHER, numbers(4), 0, indices(4, 2), sizes=[3])
    assert "S(0) R -> P" in claims(PICK, numbers(4, 3), 0, indices(4, 2), sizes=[3])


def test_truths_and_what_would_grow_are_gathered_instead() -> None:
    assert "S(0) R -> P" not in claims(GATHER, numbers(8) > 0, 0, indices(8, 2))
    assert "S(0) R -> P" not in claims(PICK, numbers(4), 0, indices(4, 9))


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_selecting_by_a_vector_of_indices(num_ranks: int) -> None:
    found = claims(PICK, numbers(3, 7, 2), -2, indices(7, 3), sizes=[num_ranks])
    assert plain(found) == {
        *("S(0) R -> S(0)", "S(2) R -> S(2)", "R S(0) -> S(1)", "S(1) R -> P", "P R -> P"),
    }


def test_two_axes_pick_from_one_dim_or_two() -> None:
    found = claims(PICK, numbers(16, 2), 0, indices(8, 3), sizes=[2, 2])
    assert {"S(0) R -> P; S(0) R -> P", "S(0) R -> P; S(1) R -> S(1)"} <= found
    found = claims(GATHER, numbers(16, 2), 0, indices(8, 2, 2), sizes=[2, 2])
    assert {"S(0) R -> P; S(0) R -> P", "S(0) R -> P; S(1) S(1) -> S(1)"} <= found


def test_taking_along_a_dim_broadcasts_the_others() -> None:
    found = claims(TAKE, numbers(4, 3, 7), indices(7, 1, 3, 2), -1)
    assert {"S(0) R -> S(0)", "S(1) S(1) -> S(1)", "R S(2) -> S(2)", "S(2) R -> P"} <= found
    assert "R S(0) -> S(0)" in claims(TAKE, numbers(1, 3), indices(3, 4, 2), 1)
    assert claims(TAKE, numbers(4, 3), indices(12, 5)) == set()
