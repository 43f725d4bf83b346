"""Scatter and index_add are sharded along other dims; ranks may add different values."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rule_proving import numbers, prove_strategies, without_blocks

aten = torch.ops.aten
ADD, PUT = aten.scatter_add.default, aten.scatter.src


def indices(below: int, *shape: int) -> torch.Tensor:
    return torch.randint(below, shape)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_scatter_add_is_sharded_along_other_dims_or_by_source(num_ranks: int) -> None:
    strategies = prove_strategies(
        ADD, numbers(4, 7), -1, indices(7, 4, 3), numbers(4, 3), sizes=[num_ranks]
    )
    assert without_blocks(strategies) == {
        *("S(0) S(0) S(0) -> S(0)", "P R P -> P"),
        *("R S(1) S(1) -> P", "P S(1) S(1) -> P"),
    }


def test_a_replicated_target_counts_once_on_two_axes() -> None:
    strategies = prove_strategies(
        ADD, numbers(4, 2), 0, indices(4, 4, 2), numbers(4, 2), sizes=[2, 2]
    )
    assert "R S(0) S(0) -> P; R S(0) S(0) -> P" in strategies
    assert "R S(0) S(0) -> P; S(1) S(1) S(1) -> S(1)" in strategies


def test_scatter_does_not_shard_the_indexed_dim() -> None:
    index = torch.tensor([[0, 2], [5, 1], [3, 4], [1, 0]])
    strategies = prove_strategies(PUT, numbers(4, 6), 1, index, numbers(4, 2))
    assert without_blocks(strategies) == {"S(0) S(0) S(0) -> S(0)", "P R P -> P"}
    strategies = prove_strategies(aten.scatter.value, numbers(4, 6), 1, index, 1.5)
    assert without_blocks(strategies) == {"S(0) S(0) -> S(0)"}


def test_dims_of_different_sizes_are_not_sharded() -> None:
    strategies = prove_strategies(ADD, numbers(4, 6), 1, indices(6, 2, 3), numbers(2, 3))
    assert not any("S(0)" in strategy for strategy in strategies)


@pytest.mark.parametrize("reduction", ["amax", "mean", "prod"])
def test_other_reductions_keep_to_their_dim(reduction: str) -> None:
    args = (1, indices(6, 4, 3), numbers(4, 3), reduction)
    strategies = prove_strategies(aten.scatter_reduce.two, numbers(4, 6), *args)
    assert without_blocks(strategies) == {"S(0) S(0) S(0) -> S(0)"}


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_rows_are_added_by_different_ranks(num_ranks: int) -> None:
    strategies = prove_strategies(
        *(aten.index_add.default, numbers(4, 7), -1, indices(7, 3), numbers(4, 3)),
        sizes=[num_ranks],
        kwargs={"alpha": 2},
    )
    assert without_blocks(strategies) == {
        *("S(0) R S(0) -> S(0)", "P R P -> P", "R S(0) S(1) -> P", "P S(0) S(1) -> P"),
    }


def test_rows_are_copied_and_filled_along_other_dims() -> None:
    where = torch.tensor([1, 3])
    strategies = prove_strategies(aten.index_copy.default, numbers(4, 6), -1, where, numbers(4, 2))
    assert without_blocks(strategies) == {"S(0) R S(0) -> S(0)", "P R P -> P"}
    assert without_blocks(
        prove_strategies(aten.index_fill.int_Scalar, numbers(4, 6), -1, where, 2.0)
    ) == {"S(0) R -> S(0)"}


@pytest.mark.parametrize("op", [aten.scatter_add.default, aten.index_add.default])
def test_scalars_are_partial_or_replicated(op: Any) -> None:
    index = torch.tensor([0]) if op == aten.index_add.default else torch.tensor(0)
    assert prove_strategies(op, numbers(), 0, index, numbers()) == {"P R P -> P"}
