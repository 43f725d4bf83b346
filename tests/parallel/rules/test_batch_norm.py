"""Batch norm is sharded by channels, by batch with running statistics, or decomposed into sums over
all ranks.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rule_proving import (
    decompose,
    numbers,
    positives,
    propagate_shards,
    prove_strategies,
    trainable,
    without_blocks,
)
from shardscope.parallel.sharding_rules.registry import find_decomposition
from shardscope.plan.placements import Partial, Replicate, Shard

aten = torch.ops.aten
FUNCTIONAL = aten._native_batch_norm_legit_functional.default
WITHOUT_RUNNING_STATS = aten._native_batch_norm_legit.no_stats
HISTORY = ("running_mean", "running_var")
R = Replicate()


def statistics(num_channels: int) -> tuple[torch.Tensor, torch.Tensor]:
    return numbers(num_channels), positives(num_channels)


def affine(num_channels: int) -> tuple[torch.Tensor, torch.Tensor]:
    return numbers(num_channels), numbers(num_channels)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_with_running_statistics_batch_and_spatial_dims_may_be_sharded(num_ranks: int) -> None:
    strategies = prove_strategies(
        *(aten.batch_norm.default, numbers(5, 6, 5), *affine(6), *statistics(6)),
        *(False, 0.1, 1e-5, False),
        sizes=[num_ranks],
        constants=HISTORY,
    )
    assert without_blocks(strategies) == {
        *("S(1) S(0) S(0) S(0) S(0) -> S(1)", "S(0) R R R R -> S(0)", "S(2) R R R R -> S(2)"),
    }


def test_with_batch_statistics_only_channels_are_sharded() -> None:
    strategies = prove_strategies(
        *(aten.batch_norm.default, numbers(4, 6), None, None, None, None),
        *(True, 0.1, 1e-5, False),
    )
    assert without_blocks(strategies) == {"S(1) -> S(1)"}


def test_the_functional_op_shards_its_new_statistics_with_the_channels() -> None:
    strategies = prove_strategies(
        *(FUNCTIONAL, numbers(4, 6, 3), *affine(6), *statistics(6), True, 0.1, 1e-5),
        sizes=[3],
        constants=HISTORY,
    )
    assert without_blocks(strategies) == {
        "S(1) S(0) S(0) S(0) S(0) -> S(1) S(0) S(0) S(0) S(0)",
    }


def test_statistics_that_were_not_computed_are_empty_and_replicated() -> None:
    op = aten._native_batch_norm_legit_no_training.default
    strategies = prove_strategies(
        *(op, numbers(4, 6, 3), *affine(6), *statistics(6), 0.1, 1e-5), constants=HISTORY
    )
    assert {
        "S(1) S(0) S(0) S(0) S(0) -> S(1) R R",
        "S(0) R R R R -> S(0) R R",
    } <= strategies
    strategies = prove_strategies(
        WITHOUT_RUNNING_STATS, numbers(4, 6, 3), *affine(6), True, 0.1, 1e-5
    )
    assert without_blocks(strategies) == {"S(1) S(0) S(0) -> S(1) S(0) S(0)"}


@pytest.mark.parametrize("shape", [(5, 3), (4, 3, 2), (3, 3, 2, 2)])
@pytest.mark.parametrize("has_affine", [True, False])
def test_decomposed_batch_norm_matches_results_and_running_statistics(
    shape: tuple[int, ...], has_affine: bool
) -> None:
    weight_and_bias = (trainable(3), trainable(3)) if has_affine else (None, None)
    decompose(FUNCTIONAL, trainable(*shape), *weight_and_bias, *statistics(3), True, 0.3, 1e-4)
    decompose(WITHOUT_RUNNING_STATS, trainable(*shape), *weight_and_bias, True, 0.3, 1e-4)
    rest = (None, None, True, 0.3, 1e-4, False)
    decompose(aten.batch_norm.default, trainable(*shape), *weight_and_bias, *rest)


def test_half_precision_statistics_have_torchs_dtype() -> None:
    wide = [tensor.float() for tensor in (*affine(3), *statistics(3))]
    decompose(FUNCTIONAL, numbers(8, 3, 2).bfloat16(), *wide, True, 0.1, 1e-5)


def test_a_sharded_batch_costs_two_sums_of_a_number_per_channel() -> None:
    def normalize(x: torch.Tensor, weight: torch.Tensor, mean: torch.Tensor) -> Any:
        return find_decomposition(FUNCTIONAL)(x, weight, weight, mean, mean, True, 0.1, 1e-5)

    tensors = [numbers(4, 3, 2), numbers(3), positives(3)]
    assert propagate_shards(normalize, tensors, [Shard(0), R, R]) == (
        [str(Partial())] * 2,
        Shard(0),
    )


def test_running_statistics_that_are_read_or_written_are_not_decomposed() -> None:
    with pytest.raises(NotImplementedError):
        find_decomposition(FUNCTIONAL)(numbers(4, 3), None, None, *statistics(3), False, 0.1, 1e-5)
    with pytest.raises(NotImplementedError):
        find_decomposition(aten.batch_norm.default)(
            numbers(4, 3), None, None, *statistics(3), True, 0.1, 1e-5, False
        )


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_instance_norm_is_sharded_by_batch_and_channels(num_ranks: int) -> None:
    op, x, rest = aten.instance_norm.default, numbers(5, 5, 3), (0.1, 1e-5, False)
    strategies = prove_strategies(op, x, *affine(5), None, None, True, *rest, sizes=[num_ranks])
    assert without_blocks(strategies) == {"S(0) R R -> S(0)", "S(1) S(0) S(0) -> S(1)"}
    assert (
        prove_strategies(op, x, None, None, *statistics(5), True, *rest, constants=HISTORY) == set()
    )
    strategies = prove_strategies(
        op, x, None, None, *statistics(5), False, *rest, constants=HISTORY
    )
    assert {"S(0) R R -> S(0)", "S(1) S(0) S(0) -> S(1)"} <= strategies


def test_decomposed_instance_norm_gives_the_same() -> None:
    for weight_and_bias in ((None, None), (trainable(3), trainable(3))):
        rest = (None, None, True, 0.1, 1e-4, False)
        decompose(aten.instance_norm.default, trainable(4, 3, 5), *weight_and_bias, *rest)
