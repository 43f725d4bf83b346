"""Pooling and resizing: batch and channels are cut, pictures are not."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rule_proving import claims, numbers, plain, spelled

aten = torch.ops.aten
CUTS = {"S(0)", "S(1)"}
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
def test_maxima_are_cut_by_batch_and_channels(case: Any) -> None:
    op, shape, *args = case
    found = claims(op, numbers(*shape), *args)
    assert {one.split()[0] for one in plain(found)} == CUTS


@pytest.mark.parametrize("case", LINEAR, ids=lambda case: str(case[0]))
def test_means_and_new_sizes_keep_addends_too(case: Any) -> None:
    op, shape, *args = case
    found = claims(op, numbers(*shape), *args)
    assert {one.split()[0] for one in plain(found)} == {*CUTS, "P"}


def test_one_picture_is_cut_by_channels_that_suffice_for_all_ranks() -> None:
    op = aten.max_pool2d.default
    assert plain(claims(op, numbers(5, 4, 4), [2, 2], sizes=[3])) == {"S(0) -> S(0)"}
    assert claims(op, numbers(4, 4, 4), [2, 2], sizes=[3]) == set()


def test_what_was_pooled_is_put_back_with_its_indices() -> None:
    pooled, where = aten.max_pool2d_with_indices.default(numbers(*PICTURES), [2, 2])
    found = claims(aten.max_unpool2d.default, pooled, where, [6, 6])
    assert plain(found) == {"S(0) S(0) -> S(0)", "S(1) S(1) -> S(1)"}


def test_channels_that_become_pixels_stay_together() -> None:
    shuffle, back = aten.pixel_shuffle.default, aten.pixel_unshuffle.default
    assert "S(1) -> S(1)" in claims(shuffle, numbers(2, 16, 3, 3), 2)
    assert "S(1) -> S(1)" not in claims(shuffle, numbers(2, 12, 3, 3), 2)
    assert "S(0) -> S(0)" in claims(shuffle, numbers(16, 3, 3), 2)
    assert {"S(0) -> S(0)", "S(1) -> S(1)", "P -> P"} <= claims(back, numbers(2, 4, 4, 4), 2)
    found = claims(aten.channel_shuffle.default, numbers(3, 4, 2, 2), 2, sizes=[3])
    assert plain(found) == {"S(0) -> S(0)", "P -> P"}


@pytest.mark.parametrize(
    "op", [aten.grid_sampler.default, aten.grid_sampler_2d.default], ids=spelled
)
def test_samples_are_taken_of_each_picture_and_channel(op: Any) -> None:
    found = claims(op, numbers(*PICTURES), numbers(2, 3, 3, 2), 0, 0, False)
    assert plain(found) == {"S(0) S(0) -> S(0)", "S(1) R -> S(1)", "P R -> P"}
