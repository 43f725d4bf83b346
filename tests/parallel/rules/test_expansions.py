"""Expanding and repeating: what was cut stays cut, what is new each rank makes for itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rule_proving import claims, numbers, spelled
from shardscope.parallel.placements import Shard

aten = torch.ops.aten


@pytest.mark.parametrize("op", [aten.expand.default, aten.broadcast_to.default], ids=spelled)
def test_expanding_makes_only_the_piece_that_a_rank_needs(op: Any) -> None:
    found = claims(op, numbers(4, 1, 5), [6, 4, 2, 5])
    assert {"S(0) -> S(1)", "S(2) -> S(3)", "R -> S(0)", "R -> S(2)", "P -> P"} <= found
    assert not any(one.startswith("S(1)") for one in found)
    kept = claims(aten.expand.default, numbers(4, 1), [-1, 6])
    assert {"S(0) -> S(0)", "R -> S(1)"} <= kept


def test_expanding_on_two_axes() -> None:
    found = claims(aten.expand.default, numbers(4, 1), [8, 4, 6], sizes=[2, 2])
    assert {"R -> S(0); R -> S(0)", "R -> S(2); S(0) -> S(1)", "S(0) -> S(1); R -> R"} <= found


def test_expanding_like_another_takes_only_its_shape() -> None:
    found = claims(
        aten.expand_as.default, numbers(1, 4), numbers(6, 4), offers=[(Shard(1), Shard(0))]
    )
    assert {"R R -> S(0)", "S(1) R -> S(1)", "S(1) S(0) -> S(1)"} <= found


@pytest.mark.parametrize(
    ("op", "args"), [(aten.repeat.default, [3, 1, 2]), (aten.tile.default, [3, 1, 2])], ids=spelled
)
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_dim_repeated_as_a_whole_becomes_blocks(op: Any, args: Any, num_ranks: int) -> None:
    found = claims(op, numbers(6, 6), args, sizes=[num_ranks])
    assert {"S(0) -> S(1)", "S(1) -> S(2, 2x)", "P -> P"} <= found
    assert "S(1, (2, 2, 2)) -> S(2, (2, 2, 2, 2, 2, 2))" in found or num_ranks == 3
    assert ("R -> S(0)" in found) == (num_ranks in (2, 3))


def test_repeating_on_two_axes() -> None:
    found = claims(aten.repeat.default, numbers(4, 1), [2, 4], sizes=[2, 2])
    assert {"S(0) -> S(0, 2x); R -> S(1)", "R -> S(1); R -> S(1)"} <= found
    assert "S(0) -> S(0, 2x); S(0) -> S(0, 2x)" in found


def test_tiling_with_fewer_counts_than_dims() -> None:
    assert "S(0) -> S(0)" in claims(aten.tile.default, numbers(4, 3), [2])


@pytest.mark.parametrize("dim", [1, -2])
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_piece_that_is_interleaved_is_a_longer_piece(dim: int, num_ranks: int) -> None:
    found = claims(
        aten.repeat_interleave.self_int,
        *(numbers(3, 6, 2), 2, dim),
        kwargs={"output_size": 12},
        sizes=[num_ranks],
    )
    assert {"S(0) -> S(0)", "S(1) -> S(1)", "P -> P"} <= found
    assert "S(1, 3x) -> S(1, 3x)" in found or num_ranks == 3


def test_interleaving_without_a_dim_flattens_and_keeps_no_cut() -> None:
    found = claims(aten.repeat_interleave.self_int, numbers(4, 6), 2)
    assert not any("S" in one for one in found)
    assert "S(0) -> S(0)" in claims(aten.repeat_interleave.self_int, numbers(4), 2)
