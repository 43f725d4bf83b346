"""Slice writes are sharded along other dims, and along the written dim if all of it is written."""

from __future__ import annotations

import sys

import pytest
import torch

from rule_proving import numbers, prove_strategies, stable_id, without_blocks

aten = torch.ops.aten


@pytest.mark.parametrize("dim", [1, -2])
def test_a_slice_is_written_along_other_dims(dim: int) -> None:
    strategies = prove_strategies(
        aten.slice_scatter.default, numbers(4, 6, 5), numbers(4, 2, 5), dim, 1, 5, 2
    )
    assert without_blocks(strategies) == {"S(0) S(0) -> S(0)", "S(2) S(2) -> S(2)", "P P -> P"}


@pytest.mark.parametrize("end", [None, sys.maxsize])
@pytest.mark.parametrize("sizes", [[2], [3], [2, 2]], ids=stable_id)
def test_a_full_slice_is_written_along_its_own_dim_too(end: int | None, sizes: list[int]) -> None:
    strategies = prove_strategies(
        aten.slice_scatter.default, numbers(8, 5), numbers(8, 5), 0, 0, end, sizes=sizes
    )
    assert any("S(0) S(0) -> S(0)" in strategy for strategy in strategies)


def test_a_slice_end_at_the_full_size_becomes_the_shards_end() -> None:
    strategies = prove_strategies(
        aten.slice_scatter.default, numbers(8, 4), numbers(8, 4), 0, 0, 8, sizes=[2, 2]
    )
    assert "S(0) S(0) -> S(0); S(1) S(1) -> S(1)" in strategies


def test_an_index_is_written_along_other_dims() -> None:
    strategies = prove_strategies(
        aten.select_scatter.default, numbers(4, 6, 5), numbers(4, 5), -2, 3
    )
    assert without_blocks(strategies) == {
        *("S(0) S(0) -> S(0)", "S(1) R -> S(1)", "S(2) S(1) -> S(2)", "P P -> P"),
    }


def test_a_diagonal_is_written_along_other_dims() -> None:
    strategies = prove_strategies(
        aten.diagonal_scatter.default, numbers(4, 3, 6), numbers(6, 3), 0, 0, 1
    )
    assert without_blocks(strategies) == {"S(2) S(0) -> S(2)", "P P -> P"}


def test_partial_sums_that_would_be_rounded_are_not_written() -> None:
    strategies = prove_strategies(
        aten.select_scatter.default, numbers(4, 6).float(), numbers(6), 0, 1
    )
    assert "P P -> P" not in strategies
