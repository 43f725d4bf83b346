"""What is scattered stays with where it goes; what is added may come from different ranks."""

from __future__ import annotations

import pytest
import torch

from rule_proving import claims, numbers, plain

aten = torch.ops.aten
ADD, PUT = aten.scatter_add.default, aten.scatter.src


def indices(below: int, *shape: int) -> torch.Tensor:
    return torch.randint(below, shape)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_adding_is_cut_along_other_dims_or_by_what_is_added(num_ranks: int) -> None:
    found = claims(ADD, numbers(4, 7), -1, indices(7, 4, 3), numbers(4, 3), sizes=[num_ranks])
    assert plain(found) == {
        *("S(0) S(0) S(0) -> S(0)", "P R P -> P"),
        *("R S(1) S(1) -> P", "P S(1) S(1) -> P"),
    }


def test_what_is_added_to_counts_once_on_two_axes() -> None:
    found = claims(ADD, numbers(4, 2), 0, indices(4, 4, 2), numbers(4, 2), sizes=[2, 2])
    assert "R S(0) S(0) -> P; R S(0) S(0) -> P" in found
    assert "R S(0) S(0) -> P; S(1) S(1) S(1) -> S(1)" in found


def test_putting_is_not_adding() -> None:
    index = torch.tensor([[0, 2], [5, 1], [3, 4], [1, 0]])
    found = claims(PUT, numbers(4, 6), 1, index, numbers(4, 2))
    assert plain(found) == {"S(0) S(0) S(0) -> S(0)", "P R P -> P"}
    found = claims(aten.scatter.value, numbers(4, 6), 1, index, 1.5)
    assert plain(found) == {"S(0) S(0) -> S(0)"}


def test_dims_of_different_sizes_are_not_cut() -> None:
    found = claims(ADD, numbers(4, 6), 1, indices(6, 2, 3), numbers(2, 3))
    assert not any("S(0)" in one for one in found)


@pytest.mark.parametrize("reduction", ["amax", "mean", "prod"])
def test_other_reductions_keep_to_their_dim(reduction: str) -> None:
    args = (1, indices(6, 4, 3), numbers(4, 3), reduction)
    found = claims(aten.scatter_reduce.two, numbers(4, 6), *args)
    assert plain(found) == {"S(0) S(0) S(0) -> S(0)"}


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_rows_are_added_by_different_ranks(num_ranks: int) -> None:
    found = claims(
        *(aten.index_add.default, numbers(4, 7), -1, indices(7, 3), numbers(4, 3)),
        sizes=[num_ranks],
        kwargs={"alpha": 2},
    )
    assert plain(found) == {
        *("S(0) R S(0) -> S(0)", "P R P -> P", "R S(0) S(1) -> P", "P S(0) S(1) -> P"),
    }


def test_rows_are_copied_and_filled_along_other_dims() -> None:
    where = torch.tensor([1, 3])
    found = claims(aten.index_copy.default, numbers(4, 6), -1, where, numbers(4, 2))
    assert plain(found) == {"S(0) R S(0) -> S(0)", "P R P -> P"}
    assert plain(claims(aten.index_fill.int_Scalar, numbers(4, 6), -1, where, 2.0)) == {
        "S(0) R -> S(0)"
    }
