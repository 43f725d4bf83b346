"""Slices are sharded along other dims, in complete blocks, or partial if they are small."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rule_proving import numbers, prove_strategies, stable_id, without_blocks
from shardscope.plan.placements import Partial, Shard

aten = torch.ops.aten
SLICE, SELECT = aten.slice.Tensor, aten.select.int
END = 2**63 - 1


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_other_dims_than_the_sliced_one_may_be_sharded(num_ranks: int) -> None:
    strategies = prove_strategies(SLICE, numbers(4, 7, 5), -2, 0, 6, sizes=[num_ranks])
    assert without_blocks(strategies) == {"S(0) -> S(0)", "S(2) -> S(2)", "P -> P"}


@pytest.mark.parametrize("bounds", [(0, END), (None, None), (0, 6)])
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_full_slice_preserves_any_sharding(bounds: tuple[Any, Any], num_ranks: int) -> None:
    assert "S(1) -> S(1)" in prove_strategies(SLICE, numbers(4, 6), 1, *bounds, sizes=[num_ranks])


def test_partial_maxima_pass_through_slices() -> None:
    candidate_placements = [(Partial("max"),)]
    for op, args in ((SLICE, (0, 1, 3)), (SELECT, (0, 1)), (aten.flip.default, ([0],))):
        assert "P(max) -> P(max)" in prove_strategies(
            op, numbers(4, 5), *args, candidate_placements=candidate_placements
        )


@pytest.mark.parametrize("bounds", [(2, 4), (3, 6), (-1, END), (-4, -2), (5, 7)])
@pytest.mark.parametrize("num_ranks", [2, 3, 5])
def test_a_small_slice_of_a_sharded_dim_is_partial(bounds: tuple[int, int], num_ranks: int) -> None:
    for op, args in ((SLICE, (0, *bounds)), (SLICE, (-2, *bounds))):
        strategies = prove_strategies(op, numbers(7, 2), *args, sizes=[num_ranks])
        assert "S(0) -> P" in strategies


def test_most_of_a_dim_is_gathered_instead() -> None:
    assert "S(0) -> P" not in prove_strategies(SLICE, numbers(8, 2), 0, 1, END)


def test_a_later_axis_does_not_mistake_a_ranks_shard_for_the_full_dim() -> None:
    for bounds in ((0, 4), (0, 2), (2, 4), (4, 8), (6, 8), (-2, END)):
        for two_axes in prove_strategies(SLICE, numbers(8), 0, *bounds, sizes=[2, 2]):
            assert "S(0) -> P; S(0) -> S(0)" not in two_axes
            assert "S(0) -> S(0); S(0) -> P" not in two_axes


def test_last_tokens_of_a_sequence_on_two_axes() -> None:
    strategies = prove_strategies(SLICE, numbers(2, 8), 1, -1, END, sizes=[2, 2])
    assert "S(1) -> P; S(1) -> P" in strategies
    assert "S(0) -> S(0); S(1) -> P" in strategies


def test_bools_are_not_partial_sums() -> None:
    assert "S(0) -> P" not in prove_strategies(SLICE, numbers(8, 2) > 0, 0, 3, 5)
    assert "S(0) -> P" not in prove_strategies(SELECT, numbers(8, 2) > 0, 0, 3)


def test_a_slice_with_steps_stays_in_its_dim() -> None:
    strategies = prove_strategies(SLICE, numbers(8, 6), 0, 0, END, 2)
    assert without_blocks(strategies) == {"S(1) -> S(1)", "P -> P"}


def test_slices_of_complete_blocks_stay_sharded() -> None:
    candidate_placements = [(Shard(1, segments=(8, 4, 4)),), (Shard(1, outer=4),)]
    strategies = prove_strategies(
        SLICE, numbers(2, 16), 1, 8, 12, candidate_placements=candidate_placements
    )
    assert {"S(1, (8, 4, 4)) -> S(1)", "S(1, 4x) -> S(1)"} <= strategies
    strategies = prove_strategies(
        SLICE, numbers(2, 16), 1, 0, 12, candidate_placements=candidate_placements
    )
    assert {"S(1, (8, 4, 4)) -> S(1, (8, 4))", "S(1, 4x) -> S(1, 3x)"} <= strategies
    strategies = prove_strategies(
        SLICE, numbers(2, 16), 1, 0, 10, candidate_placements=candidate_placements
    )
    assert not any(strategy.startswith(("S(1, (8", "S(1, 4x")) for strategy in strategies)


def test_narrow_is_a_slice() -> None:
    narrow = aten.narrow.default
    candidate_placements = [(Shard(1, outer=3),)]
    assert "S(1, 3x) -> S(1)" in prove_strategies(
        narrow, numbers(4, 12), -1, 4, 4, candidate_placements=candidate_placements
    )
    assert "S(0) -> P" in prove_strategies(narrow, numbers(8, 2), 0, 5, 2, sizes=[3])


@pytest.mark.parametrize("index", [0, 3, -1, -5])
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_select_along_a_sharded_dim_is_partial(index: int, num_ranks: int) -> None:
    strategies = prove_strategies(SELECT, numbers(2, 5, 3), -2, index, sizes=[num_ranks])
    assert {"S(1) -> P", "S(0) -> S(0)", "S(2) -> S(1)"} <= strategies
    assert "S(0) -> P" in prove_strategies(SELECT, torch.arange(5), 0, index, sizes=[num_ranks])


def test_select_along_a_dim_that_two_axes_shard() -> None:
    assert "S(0) -> P; S(0) -> P" in prove_strategies(SELECT, numbers(4, 2), 0, 2, sizes=[2, 2])


SPLITS = [
    (aten.split.Tensor, 4),
    (aten.split.sizes, [4, 4, 4]),
    (aten.split_with_sizes.default, [4, 4, 4]),
    (aten.chunk.default, 3),
    (aten.tensor_split.sections, 3),
    (aten.tensor_split.indices, [4, 8]),
    (aten.unsafe_split.Tensor, 4),
]


@pytest.mark.parametrize(("op", "sections"), SPLITS, ids=stable_id)
def test_split_shards_blocks_and_other_dims(op: Any, sections: Any) -> None:
    candidate_placements = [(Shard(1, outer=3),), (Shard(1, outer=6),)]
    strategies = prove_strategies(
        op, numbers(4, 12), sections, -1, candidate_placements=candidate_placements
    )
    assert without_blocks(strategies) == {"S(0) -> S(0) S(0) S(0)", "P -> P P P"}
    assert "S(1, 3x) -> S(1) S(1) S(1)" in strategies
    assert "S(1, 6x) -> S(1, 2x) S(1, 2x) S(1, 2x)" in strategies


def test_queries_keys_and_values_of_a_fused_projection_are_each_sharded() -> None:
    candidate_placements = [(Shard(1, segments=(8, 4, 4)),)]
    split = aten.split_with_sizes.default
    strategies = prove_strategies(
        split, numbers(2, 16), [8, 4, 4], -1, candidate_placements=candidate_placements, sizes=[2]
    )
    assert "S(1, (8, 4, 4)) -> S(1) S(1) S(1)" in strategies


def test_blocks_need_not_divide_evenly() -> None:
    candidate_placements = [(Shard(0, outer=2),)]
    assert "S(0, 2x) -> S(0) S(0)" not in prove_strategies(
        aten.chunk.default, numbers(10), 3, candidate_placements=candidate_placements
    )
    strategies = prove_strategies(
        aten.chunk.default, numbers(12), 2, candidate_placements=candidate_placements, sizes=[3]
    )
    assert "S(0, 2x) -> S(0) S(0)" in strategies


def test_uneven_splits_shard_the_other_dims() -> None:
    strategies = prove_strategies(aten.tensor_split.sections, numbers(4, 13), 3, -1)
    assert "S(0) -> S(0) S(0) S(0)" in strategies


def test_unbind_shards_the_other_dims() -> None:
    strategies = prove_strategies(aten.unbind.int, numbers(4, 2, 5), -2, sizes=[3])
    assert without_blocks(strategies) == {"S(0) -> S(0) S(0)", "S(2) -> S(1) S(1)", "P -> P P"}
