"""Copies and casts are sharded along any dim, and partial if the new dtype represents the values
exactly.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rule_proving import numbers, prove_strategies, stable_id
from shardscope.plan.placements import Shard

aten = torch.ops.aten
PRESERVED = {"P -> P", "P(max) -> P(max)", "P(min) -> P(min)"}


@pytest.mark.parametrize(
    "op",
    [
        *(aten.clone.default, aten.alias.default, aten.detach.default),
        *(aten.contiguous.default, aten.lift_fresh_copy.default),
    ],
    ids=stable_id,
)
def test_a_copy_preserves_every_placement(op: Any) -> None:
    strategies = prove_strategies(op, numbers(4, 5))
    assert strategies >= {"S(0) -> S(0)", "S(1) -> S(1)", *PRESERVED}


@pytest.mark.parametrize(
    ("before", "after", "has_partial_sums"),
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
def test_a_widening_cast_preserves_partial_sums(
    before: torch.dtype, after: torch.dtype, has_partial_sums: bool
) -> None:
    tensor = (numbers(4, 5) * 8).round().to(before)
    for strategies in (
        prove_strategies(aten.to.dtype, tensor, after),
        prove_strategies(aten._to_copy.default, tensor, kwargs={"dtype": after}),
    ):
        assert ("P -> P" in strategies) == has_partial_sums
        assert {"S(0) -> S(0)", "S(1) -> S(1)"} <= strategies


def test_a_tensor_read_for_its_dtype_may_have_any_placement() -> None:
    candidate_placements = [(Shard(0), Shard(1))]
    strategies = prove_strategies(
        aten.type_as.default,
        numbers(4, 5),
        numbers(3, 2).float(),
        candidate_placements=candidate_placements,
    )
    assert {"S(0) R -> S(0)", "S(0) S(1) -> S(0)"} <= strategies
    assert not any(strategy.startswith("P R") for strategy in strategies)


def test_real_and_imaginary_parts_are_not_split() -> None:
    strategies = prove_strategies(aten.view_as_complex.default, numbers(4, 6, 2))
    assert {"S(0) -> S(0)", "S(1) -> S(1)", "P -> P"} <= strategies
    assert not any("S(2)" in strategy for strategy in strategies)
    back = prove_strategies(aten.view_as_real.default, torch.complex(numbers(4, 6), numbers(4, 6)))
    assert {"S(0) -> S(0)", "S(1) -> S(1)", "P -> P"} <= back
    for op in (aten.real.default, aten.conj.default, aten._conj.default):
        assert "S(1) -> S(1)" in prove_strategies(op, torch.complex(numbers(4, 6), numbers(4, 6)))
