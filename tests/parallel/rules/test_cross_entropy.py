"""Class losses are sharded by samples, and by classes without gathering logits."""

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
    stable_id,
    trainable,
    without_blocks,
)
from shardscope.parallel.sharding_rules.registry import find_decomposition
from shardscope.plan.placements import Partial, Placement, Replicate, Shard

aten = torch.ops.aten
CROSS_ENTROPY = aten.cross_entropy_loss.default
NLLS = [aten.nll_loss.default, aten.nll_loss_nd.default]
NONE, MEAN, SUM = 0, 1, 2
R = Replicate()


def classes(*shape: int, ignored: int = -100) -> torch.Tensor:
    target = torch.randint(7, shape)
    target.view(-1)[0] = ignored
    return target


@pytest.mark.parametrize("op", [CROSS_ENTROPY, *NLLS], ids=stable_id)
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_samples_are_sharded_unless_the_loss_is_a_mean(op: Any, num_ranks: int) -> None:
    for reduction, result in ((NONE, "S(0)"), (SUM, "P")):
        args = (numbers(4, 7), classes(4), positives(7), reduction)
        strategies = prove_strategies(op, *args, sizes=[num_ranks], constants=["weight"])
        assert without_blocks(strategies) == {f"S(0) S(0) R -> {result}"}
        assert prove_strategies(op, numbers(4, 7), classes(4), None, MEAN) == set()


def test_positions_are_sharded_like_samples() -> None:
    strategies = prove_strategies(
        CROSS_ENTROPY, numbers(3, 7, 4), classes(3, 4), None, NONE, -100, 0.1
    )
    assert without_blocks(strategies) == {"S(0) S(0) -> S(0)", "S(2) S(1) -> S(1)"}
    probabilities = numbers(3, 7, 4).softmax(1)
    strategies = prove_strategies(CROSS_ENTROPY, numbers(3, 7, 4), probabilities, None, SUM)
    assert without_blocks(strategies) == {"S(0) S(0) -> P", "S(2) S(2) -> P"}


SHAPES = [((7,), ()), ((4, 7), (4,)), ((4, 7, 3), (4, 3)), ((2, 7, 3, 2), (2, 3, 2))]


@pytest.mark.parametrize(("logits", "target"), SHAPES, ids=stable_id)
@pytest.mark.parametrize("reduction", [NONE, MEAN, SUM])
@pytest.mark.parametrize("has_weight", [False, True])
def test_the_decomposition_gives_the_same(
    logits: tuple[int, ...], target: tuple[int, ...], reduction: int, has_weight: bool
) -> None:
    weight = positives(7) if has_weight else None
    for ignored, smoothing in ((-100, 0.0), (3, 0.0), (-100, 0.2), (3, 0.2)):
        scores_and_target = (trainable(*logits), classes(*target, ignored=ignored if target else 1))
        decompose(CROSS_ENTROPY, *scores_and_target, weight, reduction, ignored, smoothing)
    dim = min(1, len(logits) - 1)
    for smoothing in (0.0, 0.2):
        scores_and_target = (trainable(*logits), numbers(*logits).softmax(dim).requires_grad_())
        decompose(CROSS_ENTROPY, *scores_and_target, weight, reduction, -100, smoothing)


@pytest.mark.parametrize(("logits", "target"), SHAPES[:3], ids=stable_id)
@pytest.mark.parametrize("reduction", [NONE, MEAN, SUM])
def test_decomposed_nll_gives_the_same(
    logits: tuple[int, ...], target: tuple[int, ...], reduction: int
) -> None:
    for weight in (None, positives(7)):
        for ignored in (-100, 3):
            target_classes = classes(*target, ignored=ignored if target else 1)
            decompose(NLLS[1], trainable(*logits), target_classes, weight, reduction, ignored)
            if len(logits) == 2:
                decompose(NLLS[0], trainable(*logits), target_classes, weight, reduction, ignored)
                forward = aten.nll_loss_forward.default
                decompose(forward, trainable(*logits), target_classes, weight, reduction, ignored)


def test_impossible_classes_and_ignored_batches_come_out_as_torch_has_them() -> None:
    logits = numbers(4, 7)
    logits[:, 2] = -torch.inf
    target = torch.tensor([0, 1, 3, 4])
    decompose(CROSS_ENTROPY, logits.requires_grad_(), target)
    decompose(CROSS_ENTROPY, trainable(4, 7), torch.full((4,), -100))


def test_half_precision_is_widened_as_torch_widens_it() -> None:
    decompose(CROSS_ENTROPY, (numbers(16, 7) * 8).bfloat16(), classes(16))


def loss(logits: torch.Tensor, target: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = find_decomposition(CROSS_ENTROPY)(
        logits, target, weight, MEAN, -100, 0.1
    )
    return result


@pytest.mark.parametrize(
    ("placements", "exchanged", "result"),
    [
        # The losses, and what they weigh.
        ([Shard(0), Shard(0), R], ["P", "P"], R),
        ([Shard(2), Shard(1), R], ["P", "P"], R),
        # The largest, the sum of exponentials, the class's, its weight, and those of all classes.
        ([Shard(1), R, Shard(0)], ["P(max)", "P", "P", "P", "P"], R),
        ([Shard(1), R, R], ["P(max)", "P"], Partial()),
    ],
    ids=stable_id,
)
def test_logits_are_never_gathered(
    placements: list[Placement], exchanged: list[str], result: Placement
) -> None:
    tensors = [numbers(4, 6, 2), classes(4, 2) % 6, positives(6)]
    assert propagate_shards(loss, tensors, placements) == (exchanged, result)
