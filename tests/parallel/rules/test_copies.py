"""Copies and casts run on any piece, and keep addends where the new dtype holds them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rule_proving import claims, numbers, spelled
from shardscope.parallel.placements import Shard

aten = torch.ops.aten
KEPT = {"P -> P", "P(max) -> P(max)", "P(min) -> P(min)"}


@pytest.mark.parametrize(
    "op",
    [
        *(aten.clone.default, aten.alias.default, aten.detach.default),
        *(aten.contiguous.default, aten.lift_fresh_copy.default),
    ],
    ids=spelled,
)
def test_a_copy_keeps_whatever_it_is_given(op: Any) -> None:
    found = claims(op, numbers(4, 5))
    assert found >= {"S(0) -> S(0)", "S(1) -> S(1)", *KEPT}


@pytest.mark.parametrize(
    ("before", "after", "has_addends"),
    [
        (torch.float32, torch.float64, True),
        (torch.float64, torch.float32, False),
        (torch.float16, torch.bfloat16, False),
        (torch.bfloat16, torch.float32, True),
        (torch.float32, torch.float32, True),
        (torch.int64, torch.float64, True),
        (torch.float64, torch.int64, False),
        (torch.float64, torch.complex128, True),
    ],
)
def test_addends_outlive_a_cast_that_widens(
    before: torch.dtype, after: torch.dtype, has_addends: bool
) -> None:
    whole = (numbers(4, 5) * 8).round().to(before)
    for found in (
        claims(aten.to.dtype, whole, after),
        claims(aten._to_copy.default, whole, kwargs={"dtype": after}),
    ):
        assert ("P -> P" in found) == has_addends
        assert {"S(0) -> S(0)", "S(1) -> S(1)"} <= found


def test_the_tensor_that_only_lends_its_dtype_lies_as_it_likes() -> None:
    offers = [(Shard(0), Shard(1))]
    found = claims(aten.type_as.default, numbers(4, 5), numbers(3, 2).float(), offers=offers)
    assert {"S(0) R -> S(0)", "S(0) S(1) -> S(0)"} <= found
    assert not any(one.startswith("P R") for one in found)


def test_complex_numbers_stay_whole_numbers() -> None:
    found = claims(aten.view_as_complex.default, numbers(4, 6, 2))
    assert {"S(0) -> S(0)", "S(1) -> S(1)", "P -> P"} <= found
    assert not any("S(2)" in one for one in found)
    back = claims(aten.view_as_real.default, torch.complex(numbers(4, 6), numbers(4, 6)))
    assert {"S(0) -> S(0)", "S(1) -> S(1)", "P -> P"} <= back
    for op in (aten.real.default, aten.conj.default, aten._conj.default):
        assert "S(1) -> S(1)" in claims(op, torch.complex(numbers(4, 6), numbers(4, 6)))
