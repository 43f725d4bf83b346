"""Joined tensors are cut alike, lie in addends together, or become blocks of one dim."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rule_proving import claims, numbers, plain, spelled
from shardscope.parallel.placements import Shard

aten = torch.ops.aten


@pytest.mark.parametrize(
    "op", [aten.cat.default, aten.concat.default, aten.concatenate.default], ids=spelled
)
def test_along_other_dims_all_are_cut_alike(op: Any) -> None:
    found = claims(op, [numbers(4, 6), numbers(4, 3)], -1, sizes=[3])
    assert plain(found) == {"S(0) S(0) -> S(0)", "P P -> P"}


def test_cut_along_the_joined_dim_they_become_its_blocks() -> None:
    found = claims(aten.cat.default, [numbers(3, 8), numbers(3, 4), numbers(3, 4)], 1)
    assert "S(1) S(1) S(1) -> S(1, (8, 4, 4))" in found
    assert "S(0) S(0) -> S(0, 2x)" in claims(aten.cat.default, [numbers(4), numbers(4)])


def test_blocks_are_joined_to_blocks() -> None:
    offers = [(Shard(0, 2), Shard(0)), (Shard(0, 2), Shard(0, 2))]
    found = claims(aten.cat.default, [numbers(8), numbers(8)], offers=offers)
    assert "S(0, 2x) S(0) -> S(0, (4, 4, 8))" in found
    assert "S(0, 2x) S(0, 2x) -> S(0, 4x)" in found


def test_blocks_that_do_not_divide_are_not_cut() -> None:
    assert not any(
        "S(1)" in one for one in claims(aten.cat.default, [numbers(3, 8), numbers(3, 3)], 1)
    )


def test_empty_vectors_that_torch_leaves_out_are_left_whole() -> None:
    nothing = torch.empty(0, dtype=torch.float64)
    assert "R S(1) -> S(1)" in claims(aten.cat.default, [nothing, numbers(4, 6)], 0)


def test_addends_are_joined_with_addends_only() -> None:
    assert not any("P R" in one for one in claims(aten.cat.default, [numbers(2), numbers(2)]))
    assert "P P -> P" not in claims(aten.cat.default, [numbers(4) > 0, numbers(4) > 0])


@pytest.mark.parametrize(
    ("dim", "expected"),
    [
        (0, {"S(0) S(0) -> S(1)", "S(1) S(1) -> S(2)"}),
        (1, {"S(0) S(0) -> S(0)", "S(1) S(1) -> S(2)"}),
        (-1, {"S(0) S(0) -> S(0)", "S(1) S(1) -> S(1)"}),
    ],
)
def test_stacked_tensors_make_room_for_the_new_dim(dim: int, expected: set[str]) -> None:
    found = claims(aten.stack.default, [numbers(4, 6), numbers(4, 6)], dim, sizes=[3])
    assert plain(found) == {*expected, "P P -> P"}


def test_stacks_by_rows_and_columns_are_joins() -> None:
    flat = [numbers(4), numbers(4)]
    square = [numbers(4, 6), numbers(4, 6)]
    assert "S(0) S(0) -> S(0, 2x)" in claims(aten.hstack.default, flat)
    assert "S(1) S(1) -> S(1, 2x)" in claims(aten.hstack.default, square)
    assert "S(0) S(0) -> S(1)" in claims(aten.vstack.default, flat)
    assert "S(0) S(0) -> S(0, 2x)" in claims(aten.vstack.default, square)
    assert claims(aten.vstack.default, [numbers(6), numbers(4, 6)]) == set()
