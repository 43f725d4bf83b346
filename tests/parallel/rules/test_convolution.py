"""Convolutions are sharded by batch, by channels out and in, and by complete groups."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rule_proving import decompose, numbers, prove_strategies, stable_id, trainable, without_blocks
from shardscope.parallel.sharding_rules.registry import find_decomposition

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


@pytest.mark.parametrize(("op", "pixels"), DIRECT, ids=stable_id)
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_convolutions_are_sharded_by_batch_and_channels(
    op: Any, pixels: tuple[int, ...], num_ranks: int
) -> None:
    kernel = numbers(5, 3, *[2] * len(pixels))
    strategies = prove_strategies(op, numbers(3, 3, *pixels), kernel, sizes=[num_ranks])
    assert without_blocks(strategies) == {
        *("S(0) R -> S(0)", "R S(0) -> S(1)", "S(1) S(1) -> P", "P R -> P", "R P -> P"),
    }


@pytest.mark.parametrize(("op", "pixels"), TRANSPOSED, ids=stable_id)
def test_transposed_convolutions_swap_the_kernels_channel_dims(
    op: Any, pixels: tuple[int, ...]
) -> None:
    kernel = numbers(4, 6, *[2] * len(pixels))
    strategies = prove_strategies(op, numbers(3, 4, *pixels), kernel, None, [2], [1])
    assert without_blocks(strategies) == {
        *("S(0) R -> S(0)", "R S(1) -> S(1)", "S(1) S(0) -> P", "P R -> P", "R P -> P"),
    }


def test_a_bias_goes_with_the_channels_out() -> None:
    strategies = prove_strategies(CONV2D, numbers(4, 4, 5, 5), numbers(6, 4, 3, 3), numbers(6))
    assert without_blocks(strategies) == {"S(0) R R -> S(0)", "R S(0) S(0) -> S(1)"}


def test_images_without_a_batch_dim() -> None:
    strategies = prove_strategies(CONV2D, numbers(4, 5, 5), numbers(6, 4, 3, 3), numbers(6))
    assert without_blocks(strategies) == {"R S(0) S(0) -> S(0)"}
    assert "S(0) S(1) -> P" in prove_strategies(CONV2D, numbers(4, 5, 5), numbers(6, 4, 3, 3))


def test_no_rank_is_left_without_channels() -> None:
    strategies = prove_strategies(CONV2D, numbers(4, 4, 5, 5), numbers(4, 4, 3, 3), sizes=[3])
    assert without_blocks(strategies) == {"S(0) R -> S(0)", "P R -> P", "R P -> P"}


@pytest.mark.parametrize("num_groups", [2, 4])
def test_complete_groups_are_sharded(num_groups: int) -> None:
    kernel = numbers(8, 4 // num_groups, 3, 3)
    args = (numbers(2, 4, 4, 4), kernel, numbers(8), [1, 1], [1, 1], [1, 1], num_groups)
    assert without_blocks(prove_strategies(CONV2D, *args)) == {
        "S(0) R R -> S(0)",
        "S(1) S(0) S(0) -> S(1)",
    }
    assert without_blocks(prove_strategies(CONV2D, *args, sizes=[3])) == {"S(0) R R -> S(0)"}
    twice = "S(1) S(0) S(0) -> S(1); S(1) S(0) S(0) -> S(1)"
    assert (twice in prove_strategies(CONV2D, *args, sizes=[2, 2])) == (num_groups == 4)


def test_complete_transposed_groups_are_sharded() -> None:
    args = (numbers(2, 4, 3, 3), numbers(4, 3, 2, 2), None, [1, 1], [0, 0], [0, 0], 2)
    assert "S(1) S(0) -> S(1)" in prove_strategies(aten.conv_transpose2d.input, *args)
    both = prove_strategies(aten.conv_transpose2d.input, *args, sizes=[2, 2])
    assert "S(1) S(0) -> S(1); S(1) S(0) -> S(1)" not in both


def test_aten_convolution_is_sharded_too() -> None:
    op, picture = aten.convolution.default, numbers(2, 4, 4, 4)
    rest = ([1, 1], [1, 1], [1, 1])
    strategies = prove_strategies(op, picture, numbers(6, 4, 3, 3), None, *rest, False, [0, 0], 1)
    assert {"R S(0) -> S(1)", "S(1) S(1) -> P"} <= strategies
    strategies = prove_strategies(op, picture, numbers(4, 6, 3, 3), None, *rest, True, [0, 0], 1)
    assert {"R S(1) -> S(1)", "S(1) S(0) -> P"} <= strategies
    strategies = prove_strategies(
        op, picture, numbers(4, 6, 3, 3), numbers(24), *rest, True, [0, 0], 4
    )
    assert "S(1) S(0) S(0) -> S(1)" in strategies


def test_padding_may_be_a_string() -> None:
    strategies = prove_strategies(
        aten.conv2d.padding, numbers(2, 4, 4, 4), numbers(6, 4, 3, 3), None, [1], "same"
    )
    assert {"S(0) R -> S(0)", "S(1) S(1) -> P"} <= strategies


@pytest.mark.parametrize(("op", "pixels"), [*DIRECT, *TRANSPOSED], ids=stable_id)
def test_a_bias_is_added_after_the_sum_over_channels_in(op: Any, pixels: tuple[int, ...]) -> None:
    kernel = trainable(4, 4, *[2] * len(pixels))
    decompose(op, trainable(3, 4, *pixels), kernel, trainable(4), [2])
    decompose(op, trainable(4, *pixels), kernel, trainable(4))
    with pytest.raises(NotImplementedError):
        find_decomposition(op)(numbers(3, 4, *pixels), kernel)
