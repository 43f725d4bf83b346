"""Pooling and resizing are sharded by batch and channels, not by spatial dims."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rule_proving import numbers, prove_strategies, stable_id, without_blocks

aten = torch.ops.aten
SHARDS = {"S(0)", "S(1)"}
SERIES, PICTURES, BODIES = (2, 4, 6), (2, 4, 6, 6), (2, 4, 4, 4, 4)

MAXIMA = [
    (aten.max_pool1d.default, SERIES, [2]),
    (aten.max_pool1d_with_indices.default, SERIES, [2]),
    (aten.max_pool2d.default, PICTURES, [2, 2]),
    (aten.max_pool2d_with_indices.default, PICTURES, [3, 3]),
    (aten.max_pool3d_with_indices.default, BODIES, [2]),
    (aten.adaptive_max_pool1d.default, SERIES, [2]),
    (aten.adaptive_max_pool2d.default, PICTURES, [2, 2]),
    (aten.adaptive_max_pool3d.default, BODIES, [2, 2, 2]),
]
LINEAR = [
    (aten.avg_pool1d.default, SERIES, [2]),
    (aten.avg_pool2d.default, PICTURES, [3, 3], [2, 2], [1, 1]),
    (aten.avg_pool3d.default, BODIES, [2]),
    (aten.adaptive_avg_pool1d.default, SERIES, [2]),
    (aten.adaptive_avg_pool2d.default, PICTURES, [1, 1]),
    (aten._adaptive_avg_pool2d.default, PICTURES, [4, 4]),
    (aten.adaptive_avg_pool3d.default, BODIES, [2, 2, 2]),
    (aten.upsample_nearest1d.vec, SERIES, None, [2.0]),
    (aten.upsample_nearest2d.vec, PICTURES, None, [2.0, 2.0]),
    (aten.upsample_nearest2d.default, PICTURES, [9, 9]),
    (aten._upsample_nearest_exact2d.vec, PICTURES, [9, 9], None),
    (aten.upsample_linear1d.vec, SERIES, [9], True, None),
    (aten.upsample_bilinear2d.vec, PICTURES, [9, 9], False, None),
    (aten.upsample_bicubic2d.vec, PICTURES, [9, 9], False, None),
    (aten._upsample_bicubic2d_aa.vec, PICTURES, [4, 4], False, None),
    (aten.upsample_trilinear3d.vec, BODIES, [6, 6, 6], False, None),
]


@pytest.mark.parametrize("case", MAXIMA, ids=lambda case: str(case[0]))
def test_max_pooling_is_sharded_by_batch_and_channels(case: Any) -> None:
    op, shape, *args = case
    strategies = prove_strategies(op, numbers(*shape), *args)
    assert {strategy.split()[0] for strategy in without_blocks(strategies)} == SHARDS


@pytest.mark.parametrize("case", LINEAR, ids=lambda case: str(case[0]))
def test_average_pooling_and_resizing_allow_partial_sums(case: Any) -> None:
    op, shape, *args = case
    strategies = prove_strategies(op, numbers(*shape), *args)
    assert {strategy.split()[0] for strategy in without_blocks(strategies)} == {*SHARDS, "P"}


def test_an_unbatched_image_is_sharded_by_channels_if_every_rank_gets_some() -> None:
    op = aten.max_pool2d.default
    assert without_blocks(prove_strategies(op, numbers(5, 4, 4), [2, 2], sizes=[3])) == {
        "S(0) -> S(0)"
    }
    assert prove_strategies(op, numbers(4, 4, 4), [2, 2], sizes=[3]) == set()


def test_unpooling_shards_values_with_their_indices() -> None:
    pooled, where = aten.max_pool2d_with_indices.default(numbers(*PICTURES), [2, 2])
    strategies = prove_strategies(aten.max_unpool2d.default, pooled, where, [6, 6])
    assert without_blocks(strategies) == {"S(0) S(0) -> S(0)", "S(1) S(1) -> S(1)"}


def test_pixel_shuffle_shards_complete_groups_of_channels() -> None:
    shuffle, back = aten.pixel_shuffle.default, aten.pixel_unshuffle.default
    assert "S(1) -> S(1)" in prove_strategies(shuffle, numbers(2, 16, 3, 3), 2)
    assert "S(1) -> S(1)" not in prove_strategies(shuffle, numbers(2, 12, 3, 3), 2)
    assert "S(0) -> S(0)" in prove_strategies(shuffle, numbers(16, 3, 3), 2)
    assert {"S(0) -> S(0)", "S(1) -> S(1)", "P -> P"} <= prove_strategies(
        back, numbers(2, 4, 4, 4), 2
    )
    strategies = prove_strategies(aten.channel_shuffle.default, numbers(3, 4, 2, 2), 2, sizes=[3])
    assert without_blocks(strategies) == {"S(0) -> S(0)", "P -> P"}


@pytest.mark.parametrize(
    "op", [aten.grid_sampler.default, aten.grid_sampler_2d.default], ids=stable_id
)
def test_grid_sampler_is_sharded_by_batch_and_channels(op: Any) -> None:
    strategies = prove_strategies(op, numbers(*PICTURES), numbers(2, 3, 3, 2), 0, 0, False)
    assert without_blocks(strategies) == {"S(0) S(0) -> S(0)", "S(1) R -> S(1)", "P R -> P"}
