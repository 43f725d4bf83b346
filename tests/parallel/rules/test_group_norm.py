"""Group norm is sharded by batch or by complete groups, or decomposed into sums if a group itself
is sharded.
"""

from __future__ import annotations

import pytest
import torch

from rule_proving import (
    decompose,
    numbers,
    propagate_shards,
    prove_strategies,
    stable_id,
    trainable,
    without_blocks,
)
from shardscope.parallel.sharding_rules.registry import find_decomposition
from shardscope.plan.placements import Partial, Replicate, Shard

aten = torch.ops.aten
GROUP_NORM, NATIVE = aten.group_norm.default, aten.native_group_norm.default


@pytest.mark.parametrize(("num_groups", "num_ranks"), [(2, 2), (3, 3), (6, 2), (6, 3)])
def test_groups_that_divide_are_sharded_with_their_channels(
    num_groups: int, num_ranks: int
) -> None:
    args = (numbers(3, 6, 2), num_groups, numbers(6), numbers(6))
    strategies = prove_strategies(GROUP_NORM, *args, sizes=[num_ranks])
    assert without_blocks(strategies) == {"S(0) R R -> S(0)", "S(1) S(0) S(0) -> S(1)"}


def test_groups_that_do_not_divide_are_not_sharded() -> None:
    assert without_blocks(prove_strategies(GROUP_NORM, numbers(4, 6, 2), 3)) == {"S(0) -> S(0)"}


def test_two_axes_share_the_groups() -> None:
    strategies = prove_strategies(GROUP_NORM, numbers(2, 8), 4, sizes=[2, 2])
    assert {"S(1) -> S(1); S(1) -> S(1)", "S(0) -> S(0); S(1) -> S(1)"} <= strategies


def test_native_group_norm_gets_local_sizes() -> None:
    args = (numbers(4, 6, 2, 3), numbers(6), numbers(6), 4, 6, 6, 2, 1e-5)
    strategies = prove_strategies(NATIVE, *args)
    assert without_blocks(strategies) == {
        "S(0) R R -> S(0) S(0) S(0)",
        "S(1) S(0) S(0) -> S(1) S(1) S(1)",
    }


@pytest.mark.parametrize("shape", [(4, 6), (4, 6, 3), (4, 6, 2, 2)])
def test_the_decomposition_gives_the_same(shape: tuple[int, ...]) -> None:
    decompose(GROUP_NORM, trainable(*shape), 3, trainable(6), trainable(6), 1e-4)
    decompose(GROUP_NORM, trainable(*shape), 2)
    decompose(GROUP_NORM, numbers(*shape).bfloat16(), 2)


@pytest.mark.parametrize("shard", [Shard(0), Shard(1), Shard(2)], ids=stable_id)
def test_the_decomposition_gathers_nothing(shard: Shard) -> None:
    def normalize(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = find_decomposition(GROUP_NORM)(x, 2, weight, weight)
        return result

    weight = Shard(0) if shard.dim == 1 else Replicate()
    sums, _ = propagate_shards(normalize, [numbers(4, 8, 4), numbers(8)], [shard, weight])
    assert sums == ([] if shard.dim < 2 else [str(Partial())] * 2)
