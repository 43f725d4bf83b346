"""Convolutions are cut by batch, by channels out and in, and by whole groups."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rule_proving import claims, learned, numbers, plain, spelled, take_apart
from shardscope.parallel.rules.lookup import find_decomposition

aten = torch.ops.aten
CONV2D = aten.conv2d.default

DIRECT = [
    (aten.conv1d.default, (5,)),
    (CONV2D, (5, 4)),
    (aten.conv3d.default, (4, 3, 3)),
]
TRANSPOSED = [
    (aten.conv_transpose1d.default, (5,)),
    (aten.conv_transpose2d.input, (3, 4)),
    (aten.conv_transpose3d.input, (3, 2, 2)),
]


@pytest.mark.parametrize(("op", "pixels"), DIRECT, ids=spelled)
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_they_are_cut_by_batch_and_channels(
    op: Any, pixels: tuple[int, ...], num_ranks: int
) -> None:
    kernel = numbers(5, 3, *[2] * len(pixels))
    found = claims(op, numbers(3, 3, *pixels), kernel, sizes=[num_ranks])
    assert plain(found) == {
        *("S(0) R -> S(0)", "R S(0) -> S(1)", "S(1) S(1) -> P", "P R -> P", "R P -> P"),
    }


@pytest.mark.parametrize(("op", "pixels"), TRANSPOSED, ids=spelled)
def test_transposed_ones_have_their_kernels_the_other_way_round(
    op: Any, pixels: tuple[int, ...]
) -> None:
    kernel = numbers(4, 6, *[2] * len(pixels))
    found = claims(op, numbers(3, 4, *pixels), kernel, None, [2], [1])
    assert plain(found) == {
        *("S(0) R -> S(0)", "R S(1) -> S(1)", "S(1) S(0) -> P", "P R -> P", "R P -> P"),
    }


def test_a_bias_goes_with_the_channels_out() -> None:
    found = claims(CONV2D, numbers(4, 4, 5, 5), numbers(6, 4, 3, 3), numbers(6))
    assert plain(found) == {"S(0) R R -> S(0)", "R S(0) S(0) -> S(1)"}


def test_pictures_without_a_batch() -> None:
    found = claims(CONV2D, numbers(4, 5, 5), numbers(6, 4, 3, 3), numbers(6))
    assert plain(found) == {"R S(0) S(0) -> S(0)"}
    assert "S(0) S(1) -> P" in claims(CONV2D, numbers(4, 5, 5), numbers(6, 4, 3, 3))


def test_no_rank_is_left_without_channels() -> None:
    found = claims(CONV2D, numbers(4, 4, 5, 5), numbers(4, 4, 3, 3), sizes=[3])
    assert plain(found) == {"S(0) R -> S(0)", "P R -> P", "R P -> P"}


@pytest.mark.parametrize("num_groups", [2, 4])
def test_groups_are_cut_whole(num_groups: int) -> None:
    kernel = numbers(8, 4 // num_groups, 3, 3)
    args = (numbers(2, 4, 4, 4), kernel, numbers(8), [1, 1], [1, 1], [1, 1], num_groups)
    assert plain(claims(CONV2D, *args)) == {"S(0) R R -> S(0)", "S(1) S(0) S(0) -> S(1)"}
    assert plain(claims(CONV2D, *args, sizes=[3])) == {"S(0) R R -> S(0)"}
    twice = "S(1) S(0) S(0) -> S(1); S(1) S(0) S(0) -> S(1)"
    assert (twice in claims(CONV2D, *args, sizes=[2, 2])) == (num_groups == 4)


def test_transposed_groups_are_cut_whole() -> None:
    args = (numbers(2, 4, 3, 3), numbers(4, 3, 2, 2), None, [1, 1], [0, 0], [0, 0], 2)
    assert "S(1) S(0) -> S(1)" in claims(aten.conv_transpose2d.input, *args)
    both = claims(aten.conv_transpose2d.input, *args, sizes=[2, 2])
    assert "S(1) S(0) -> S(1); S(1) S(0) -> S(1)" not in both


def test_the_op_beneath_them_all() -> None:
    op, picture = aten.convolution.default, numbers(2, 4, 4, 4)
    rest = ([1, 1], [1, 1], [1, 1])
    found = claims(op, picture, numbers(6, 4, 3, 3), None, *rest, False, [0, 0], 1)
    assert {"R S(0) -> S(1)", "S(1) S(1) -> P"} <= found
    found = claims(op, picture, numbers(4, 6, 3, 3), None, *rest, True, [0, 0], 1)
    assert {"R S(1) -> S(1)", "S(1) S(0) -> P"} <= found
    found = claims(op, picture, numbers(4, 6, 3, 3), numbers(24), *rest, True, [0, 0], 4)
    assert "S(1) S(0) S(0) -> S(1)" in found


def test_padding_may_be_a_word() -> None:
    found = claims(aten.conv2d.padding, numbers(2, 4, 4, 4), numbers(6, 4, 3, 3), None, [1], "same")
    assert {"S(0) R -> S(0)", "S(1) S(1) -> P"} <= found


@pytest.mark.parametrize(("op", "pixels"), [*DIRECT, *TRANSPOSED], ids=spelled)
def test_a_bias_is_added_after_the_sum_over_channels_in(op: Any, pixels: tuple[int, ...]) -> None:
    kernel = learned(4, 4, *[2] * len(pixels))
    take_apart(op, learned(3, 4, *pixels), kernel, learned(4), [2])
    take_apart(op, learned(4, *pixels), kernel, learned(4))
    with pytest.raises(NotImplementedError):
        find_decomposition(op)(numbers(3, 4, *pixels), kernel)
