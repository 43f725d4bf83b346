"""Slices that are written: other dims stay cut, the written one only if all of it is."""

from __future__ import annotations

import sys

import pytest
import torch

from rule_proving import claims, numbers, plain, spelled

aten = torch.ops.aten


@pytest.mark.parametrize("dim", [1, -2])
def test_a_slice_is_written_along_other_dims(dim: int) -> None:
    found = claims(aten.slice_scatter.default, numbers(4, 6, 5), numbers(4, 2, 5), dim, 1, 5, 2)
    assert plain(found) == {"S(0) S(0) -> S(0)", "S(2) S(2) -> S(2)", "P P -> P"}


@pytest.mark.parametrize("end", [None, sys.maxsize])
@pytest.mark.parametrize("sizes", [[2], [3], [2, 2]], ids=spelled)
def test_a_slice_of_everything_is_written_along_its_own_dim_too(
    end: int | None, sizes: list[int]
) -> None:
    found = claims(aten.slice_scatter.default, numbers(8, 5), numbers(8, 5), 0, 0, end, sizes=sizes)
    assert any("S(0) S(0) -> S(0)" in one for one in found)


def test_an_end_that_is_the_size_of_the_whole_is_not_that_of_a_piece() -> None:
    found = claims(aten.slice_scatter.default, numbers(8, 4), numbers(8, 4), 0, 0, 8, sizes=[2, 2])
    assert "S(0) S(0) -> S(0); S(1) S(1) -> S(1)" in found


def test_an_index_is_written_along_other_dims() -> None:
    found = claims(aten.select_scatter.default, numbers(4, 6, 5), numbers(4, 5), -2, 3)
    assert plain(found) == {
        *("S(0) S(0) -> S(0)", "S(1) R -> S(1)", "S(2) S(1) -> S(2)", "P P -> P"),
    }


def test_a_diagonal_is_written_along_other_dims() -> None:
    found = claims(aten.diagonal_scatter.default, numbers(4, 3, 6), numbers(6, 3), 0, 0, 1)
    assert plain(found) == {"S(2) S(0) -> S(2)", "P P -> P"}


def test_addends_that_would_be_rounded_are_not_written() -> None:
    found = claims(aten.select_scatter.default, numbers(4, 6).float(), numbers(6), 0, 1)
    assert "P P -> P" not in found
