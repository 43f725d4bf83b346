"""Writes over a part of a tensor: each rank writes what falls into its piece."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rule_proving import claims, numbers, plain

aten = torch.ops.aten
SELECT, SLICE = aten.select_scatter.default, aten.slice_scatter.default
END = 2**63 - 1


@pytest.mark.parametrize("index", [0, 2, -1])
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_one_index_is_written_by_the_rank_that_has_it(index: int, num_ranks: int) -> None:
    found = claims(SELECT, numbers(3, 4, 5), numbers(3, 5), -2, index, sizes=[num_ranks])
    assert plain(found) == {
        *("S(0) S(0) -> S(0)", "S(1) R -> S(1)", "S(2) S(1) -> S(2)", "P P -> P"),
    }


@pytest.mark.parametrize("bounds", [(0, 4), (2, 7), (-1, END), (None, -9), (5, 5), (0, END)])
@pytest.mark.parametrize("num_ranks", [2, 4, 5])
def test_a_slice_is_written_in_pieces(bounds: tuple[Any, Any], num_ranks: int) -> None:
    cache = numbers(11, 3)
    part = numbers(*cache[slice(*bounds)].shape)
    found = claims(SLICE, cache, part, 0, *bounds, sizes=[num_ranks])
    own = "S(0) S(0) -> S(0)" if bounds == (0, END) else "S(0) R -> S(0)"
    assert plain(found) == {own, "S(1) S(1) -> S(1)", "P P -> P"}


def test_two_axes_write_to_one_dim_or_two() -> None:
    found = claims(SLICE, numbers(8, 2), numbers(3, 2), 0, 2, 5, sizes=[2, 2])
    assert {"S(0) R -> S(0); S(0) R -> S(0)", "S(0) R -> S(0); S(1) S(1) -> S(1)"} <= found
    found = claims(SELECT, numbers(8, 2), numbers(2), 0, 5, sizes=[2, 2])
    assert {"S(0) R -> S(0); S(0) R -> S(0)", "S(0) R -> S(0); S(1) S(0) -> S(1)"} <= found


def test_a_later_axis_does_not_take_one_ranks_piece_for_the_whole_dim() -> None:
    for bounds in ((0, 4), (0, 2), (4, 8), (2, 6)):
        part = numbers(bounds[1] - bounds[0])
        found = claims(SLICE, numbers(8), part, 0, *bounds, sizes=[2, 2])
        assert "S(0) R -> S(0); S(0) S(0) -> S(0)" not in found
