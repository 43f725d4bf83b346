"""Factories such as zeros_like read a tensor's shape or dtype, never its values."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rule_proving import numbers, prove_strategies, stable_id, without_blocks
from shardscope.plan.placements import Partial, Shard

aten = torch.ops.aten
CANDIDATES = [(Partial(),)]


@pytest.mark.parametrize(
    ("op", "args"),
    [
        (aten.zeros_like.default, ()),
        (aten.ones_like.default, ()),
        (aten.full_like.default, (2.5,)),
    ],
    ids=stable_id,
)
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_like_factories_are_sharded_like_their_tensor(
    op: Any, args: tuple[Any, ...], num_ranks: int
) -> None:
    strategies = prove_strategies(
        op, numbers(4, 3), *args, candidate_placements=CANDIDATES, sizes=[num_ranks]
    )
    assert without_blocks(strategies) == {"S(0) -> S(0)", "S(1) -> S(1)", "P -> R"}


@pytest.mark.parametrize(
    ("op", "args"),
    [
        (aten.new_zeros.default, ([3, 5],)),
        (aten.new_ones.default, ([3, 5],)),
        (aten.new_full.default, ([3, 5], 1.5)),
    ],
    ids=stable_id,
)
def test_new_factories_are_replicated(op: Any, args: tuple[Any, ...]) -> None:
    candidate_placements = [*CANDIDATES, (Shard(0, outer=2),)]
    strategies = prove_strategies(
        op, numbers(4, 3), *args, candidate_placements=candidate_placements
    )
    assert {"S(0) -> R", "S(1) -> R", "P -> R", "S(0, 2x) -> R"} <= strategies
    assert not any("-> S" in strategy for strategy in strategies)
