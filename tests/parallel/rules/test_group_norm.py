"""Group norm by batch or by whole groups, and in sums where a group itself is cut."""

from __future__ import annotations

import pytest
import torch

from rule_proving import claims, cut_through, learned, numbers, plain, spelled, take_apart
from shardscope.parallel.placements import Partial, Replicate, Shard
from shardscope.parallel.rules.lookup import find_decomposition

aten = torch.ops.aten
GROUP_NORM, NATIVE = aten.group_norm.default, aten.native_group_norm.default


@pytest.mark.parametrize(("num_groups", "num_ranks"), [(2, 2), (3, 3), (6, 2), (6, 3)])
def test_groups_that_divide_are_cut_with_their_channels(num_groups: int, num_ranks: int) -> None:
    args = (numbers(3, 6, 2), num_groups, numbers(6), numbers(6))
    found = claims(GROUP_NORM, *args, sizes=[num_ranks])
    assert plain(found) == {"S(0) R R -> S(0)", "S(1) S(0) S(0) -> S(1)"}


def test_groups_that_do_not_divide_stay_whole() -> None:
    assert plain(claims(GROUP_NORM, numbers(4, 6, 2), 3)) == {"S(0) -> S(0)"}


def test_two_axes_share_the_groups() -> None:
    found = claims(GROUP_NORM, numbers(2, 8), 4, sizes=[2, 2])
    assert {"S(1) -> S(1); S(1) -> S(1)", "S(0) -> S(0); S(1) -> S(1)"} <= found


def test_the_op_that_returns_statistics_is_told_local_sizes() -> None:
    args = (numbers(4, 6, 2, 3), numbers(6), numbers(6), 4, 6, 6, 2, 1e-5)
    found = claims(NATIVE, *args)
    assert plain(found) == {"S(0) R R -> S(0) S(0) S(0)", "S(1) S(0) S(0) -> S(1) S(1) S(1)"}


@pytest.mark.parametrize("shape", [(4, 6), (4, 6, 3), (4, 6, 2, 2)])
def test_taken_apart_it_gives_the_same(shape: tuple[int, ...]) -> None:
    take_apart(GROUP_NORM, learned(*shape), 3, learned(6), learned(6), 1e-4)
    take_apart(GROUP_NORM, learned(*shape), 2)
    take_apart(GROUP_NORM, numbers(*shape).bfloat16(), 2)


@pytest.mark.parametrize("cut", [Shard(0), Shard(1), Shard(2)], ids=spelled)
def test_taken_apart_no_piece_is_gathered(cut: Shard) -> None:
    def normalize(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = find_decomposition(GROUP_NORM)(x, 2, weight, weight)
        return result

    weight = Shard(0) if cut.dim == 1 else Replicate()
    sums, _ = cut_through(normalize, [numbers(4, 8, 4), numbers(8)], [cut, weight])
    assert sums == ([] if cut.dim < 2 else [str(Partial())] * 2)
