"""Parts of a dim: cuts of other dims pass, blocks stay whole, small parts come in addends."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rule_proving import claims, numbers, plain, spelled
from shardscope.parallel.placements import Partial, Shard

aten = torch.ops.aten
SLICE, SELECT = aten.slice.Tensor, aten.select.int
END = 2**63 - 1


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_other_dims_than_the_sliced_one_may_be_cut(num_ranks: int) -> None:
    found = claims(SLICE, numbers(4, 7, 5), -2, 0, 6, sizes=[num_ranks])
    assert plain(found) == {"S(0) -> S(0)", "S(2) -> S(2)", "P -> P"}


@pytest.mark.parametrize("bounds", [(0, END), (None, None), (0, 6)])
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_slice_of_everything_passes_any_cut(bounds: tuple[Any, Any], num_ranks: int) -> None:
    assert "S(1) -> S(1)" in claims(SLICE, numbers(4, 6), 1, *bounds, sizes=[num_ranks])


def test_largest_values_pass_as_addends_do() -> None:
    offers = [(Partial("max"),)]
    for op, args in ((SLICE, (0, 1, 3)), (SELECT, (0, 1)), (aten.flip.default, ([0],))):
        assert "P(max) -> P(max)" in claims(op, numbers(4, 5), *args, offers=offers)


@pytest.mark.parametrize("bounds", [(2, 4), (3, 6), (-1, END), (-4, -2), (5, 7)])
@pytest.mark.parametrize("num_ranks", [2, 3, 5])
def test_a_small_part_of_a_cut_dim_comes_in_addends(
    bounds: tuple[int, int], num_ranks: int
) -> None:
    for op, args in ((SLICE, (0, *bounds)), (SLICE, (-2, *bounds))):
        found = claims(op, numbers(7, 2), *args, sizes=[num_ranks])
        assert "S(0) -> P" in found


def test_most_of_a_dim_is_gathered_instead() -> None:
    assert "S(0) -> P" not in claims(SLICE, numbers(8, 2), 0, 1, END)


def test_a_later_axis_does_not_take_one_ranks_piece_for_the_whole_dim() -> None:
    for bounds in ((0, 4), (0, 2), (2, 4), (4, 8), (6, 8), (-2, END)):
        for two_axes in claims(SLICE, numbers(8), 0, *bounds, sizes=[2, 2]):
            assert "S(0) -> P; S(0) -> S(0)" not in two_axes
            assert "S(0) -> S(0); S(0) -> P" not in two_axes


def test_last_tokens_of_a_sequence_on_two_axes() -> None:
    found = claims(SLICE, numbers(2, 8), 1, -1, END, sizes=[2, 2])
    assert "S(1) -> P; S(1) -> P" in found
    assert "S(0) -> S(0); S(1) -> P" in found


def test_truths_are_not_added() -> None:
    assert "S(0) -> P" not in claims(SLICE, numbers(8, 2) > 0, 0, 3, 5)
    assert "S(0) -> P" not in claims(SELECT, numbers(8, 2) > 0, 0, 3)


def test_a_slice_with_steps_stays_in_its_dim() -> None:
    found = claims(SLICE, numbers(8, 6), 0, 0, END, 2)
    assert plain(found) == {"S(1) -> S(1)", "P -> P"}


def test_whole_blocks_are_cut_as_they_were() -> None:
    offers = [(Shard(1, segments=(8, 4, 4)),), (Shard(1, outer=4),)]
    found = claims(SLICE, numbers(2, 16), 1, 8, 12, offers=offers)
    assert {"S(1, (8, 4, 4)) -> S(1)", "S(1, 4x) -> S(1)"} <= found
    found = claims(SLICE, numbers(2, 16), 1, 0, 12, offers=offers)
    assert {"S(1, (8, 4, 4)) -> S(1, (8, 4))", "S(1, 4x) -> S(1, 3x)"} <= found
    found = claims(SLICE, numbers(2, 16), 1, 0, 10, offers=offers)
    assert not any(one.startswith(("S(1, (8", "S(1, 4x")) for one in found)


def test_narrow_is_a_slice() -> None:
    narrow = aten.narrow.default
    offers = [(Shard(1, outer=3),)]
    assert "S(1, 3x) -> S(1)" in claims(narrow, numbers(4, 12), -1, 4, 4, offers=offers)
    assert "S(0) -> P" in claims(narrow, numbers(8, 2), 0, 5, 2, sizes=[3])


@pytest.mark.parametrize("index", [0, 3, -1, -5])
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_one_index_of_a_cut_dim_comes_from_the_rank_that_has_it(index: int, num_ranks: int) -> None:
    found = claims(SELECT, numbers(2, 5, 3), -2, index, sizes=[num_ranks])
    assert {"S(1) -> P", "S(0) -> S(0)", "S(2) -> S(1)"} <= found
    assert "S(0) -> P" in claims(SELECT, torch.arange(5), 0, index, sizes=[num_ranks])


def test_one_index_of_a_dim_that_two_axes_cut() -> None:
    assert "S(0) -> P; S(0) -> P" in claims(SELECT, numbers(4, 2), 0, 2, sizes=[2, 2])


SPLITS = [
    (aten.split.Tensor, 4),
    (aten.split.sizes, [4, 4, 4]),
    (aten.split_with_sizes.default, [4, 4, 4]),
    (aten.chunk.default, 3),
    (aten.tensor_split.sections, 3),
    (aten.tensor_split.indices, [4, 8]),
    (aten.unsafe_split.Tensor, 4),
]


@pytest.mark.parametrize(("op", "how"), SPLITS, ids=spelled)
def test_a_split_hands_out_blocks_and_passes_other_cuts(op: Any, how: Any) -> None:
    offers = [(Shard(1, outer=3),), (Shard(1, outer=6),)]
    found = claims(op, numbers(4, 12), how, -1, offers=offers)
    assert plain(found) == {"S(0) -> S(0) S(0) S(0)", "P -> P P P"}
    assert "S(1, 3x) -> S(1) S(1) S(1)" in found
    assert "S(1, 6x) -> S(1, 2x) S(1, 2x) S(1, 2x)" in found


def test_queries_keys_and_values_of_one_projection_are_cut_each() -> None:
    offers = [(Shard(1, segments=(8, 4, 4)),)]
    split = aten.split_with_sizes.default
    found = claims(split, numbers(2, 16), [8, 4, 4], -1, offers=offers, sizes=[2])
    assert "S(1, (8, 4, 4)) -> S(1) S(1) S(1)" in found


def test_blocks_need_not_divide_evenly() -> None:
    offers = [(Shard(0, outer=2),)]
    assert "S(0, 2x) -> S(0) S(0)" not in claims(aten.chunk.default, numbers(10), 3, offers=offers)
    found = claims(aten.chunk.default, numbers(12), 2, offers=offers, sizes=[3])
    assert "S(0, 2x) -> S(0) S(0)" in found


def test_uneven_parts_keep_the_other_dims() -> None:
    found = claims(aten.tensor_split.sections, numbers(4, 13), 3, -1)
    assert "S(0) -> S(0) S(0) S(0)" in found


def test_unbinding_leaves_the_other_dims() -> None:
    found = claims(aten.unbind.int, numbers(4, 2, 5), -2, sizes=[3])
    assert plain(found) == {"S(0) -> S(0) S(0)", "S(2) -> S(1) S(1)", "P -> P P"}
