"""Writes to a part of a tensor: each rank writes what falls into its shard."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rule_proving import numbers, prove_strategies, without_blocks

aten = torch.ops.aten
SELECT, SLICE = aten.select_scatter.default, aten.slice_scatter.default
END = 2**63 - 1


@pytest.mark.parametrize("index", [0, 2, -1])
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_select_scatter_is_written_by_the_rank_that_holds_the_index(
    index: int, num_ranks: int
) -> None:
    strategies = prove_strategies(
        SELECT, numbers(3, 4, 5), numbers(3, 5), -2, index, sizes=[num_ranks]
    )
    assert without_blocks(strategies) == {
        *("S(0) S(0) -> S(0)", "S(1) R -> S(1)", "S(2) S(1) -> S(2)", "P P -> P"),
    }


@pytest.mark.parametrize("bounds", [(0, 4), (2, 7), (-1, END), (None, -9), (5, 5), (0, END)])
@pytest.mark.parametrize("num_ranks", [2, 4, 5])
def test_slice_scatter_is_written_in_shards(bounds: tuple[Any, Any], num_ranks: int) -> None:
    cache = numbers(11, 3)
    part = numbers(*cache[slice(*bounds)].shape)
    strategies = prove_strategies(SLICE, cache, part, 0, *bounds, sizes=[num_ranks])
    along_slice = "S(0) S(0) -> S(0)" if bounds == (0, END) else "S(0) R -> S(0)"
    assert without_blocks(strategies) == {along_slice, "S(1) S(1) -> S(1)", "P P -> P"}


def test_two_axes_write_to_the_same_or_different_dims() -> None:
    strategies = prove_strategies(SLICE, numbers(8, 2), numbers(3, 2), 0, 2, 5, sizes=[2, 2])
    assert {"S(0) R -> S(0); S(0) R -> S(0)", "S(0) R -> S(0); S(1) S(1) -> S(1)"} <= strategies
    strategies = prove_strategies(SELECT, numbers(8, 2), numbers(2), 0, 5, sizes=[2, 2])
    assert {"S(0) R -> S(0); S(0) R -> S(0)", "S(0) R -> S(0); S(1) S(0) -> S(1)"} <= strategies


def test_a_later_axis_does_not_mistake_a_ranks_shard_for_the_full_dim() -> None:
    for bounds in ((0, 4), (0, 2), (4, 8), (2, 6)):
        part = numbers(bounds[1] - bounds[0])
        strategies = prove_strategies(SLICE, numbers(8), part, 0, *bounds, sizes=[2, 2])
        assert "S(0) R -> S(0); S(0) S(0) -> S(0)" not in strategies
