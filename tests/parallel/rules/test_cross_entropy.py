"""Losses that pick a class: cut by samples, and by classes without gathering logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rule_proving import (
    claims,
    cut_through,
    learned,
    numbers,
    plain,
    positives,
    spelled,
    take_apart,
)
from shardscope.parallel.placements import Partial, Placement, Replicate, Shard
from shardscope.parallel.rules.lookup import find_decomposition

aten = torch.ops.aten
CROSS_ENTROPY = aten.cross_entropy_loss.default
NLLS = [aten.nll_loss.default, aten.nll_loss_nd.default]
NONE, MEAN, SUM = 0, 1, 2
R = Replicate()


def classes(*shape: int, ignored: int = -100) -> torch.Tensor:
    target = torch.randint(7, shape)
    target.view(-1)[0] = ignored
    return target


@pytest.mark.parametrize("op", [CROSS_ENTROPY, *NLLS], ids=spelled)
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_samples_are_cut_where_nothing_is_averaged(op: Any, num_ranks: int) -> None:
    for reduction, result in ((NONE, "S(0)"), (SUM, "P")):
        args = (numbers(4, 7), classes(4), positives(7), reduction)
        found = claims(op, *args, sizes=[num_ranks], constants=["weight"])
        assert plain(found) == {f"S(0) S(0) R -> {result}"}
        assert claims(op, numbers(4, 7), classes(4), None, MEAN) == set()


def test_positions_are_cut_like_samples() -> None:
    found = claims(CROSS_ENTROPY, numbers(3, 7, 4), classes(3, 4), None, NONE, -100, 0.1)
    assert plain(found) == {"S(0) S(0) -> S(0)", "S(2) S(1) -> S(1)"}
    probabilities = numbers(3, 7, 4).softmax(1)
    found = claims(CROSS_ENTROPY, numbers(3, 7, 4), probabilities, None, SUM)
    assert plain(found) == {"S(0) S(0) -> P", "S(2) S(2) -> P"}


SHAPES = [((7,), ()), ((4, 7), (4,)), ((4, 7, 3), (4, 3)), ((2, 7, 3, 2), (2, 3, 2))]


@pytest.mark.parametrize(("logits", "target"), SHAPES, ids=spelled)
@pytest.mark.parametrize("reduction", [NONE, MEAN, SUM])
@pytest.mark.parametrize("has_weight", [False, True])
def test_taken_apart_it_gives_the_same(
    logits: tuple[int, ...], target: tuple[int, ...], reduction: int, has_weight: bool
) -> None:
    weight = positives(7) if has_weight else None
    for ignored, smoothing in ((-100, 0.0), (3, 0.0), (-100, 0.2), (3, 0.2)):
        given = (learned(*logits), classes(*target, ignored=ignored if target else 1))
        take_apart(CROSS_ENTROPY, *given, weight, reduction, ignored, smoothing)
    dim = min(1, len(logits) - 1)
    for smoothing in (0.0, 0.2):
        given = (learned(*logits), numbers(*logits).softmax(dim).requires_grad_())
        take_apart(CROSS_ENTROPY, *given, weight, reduction, -100, smoothing)


@pytest.mark.parametrize(("logits", "target"), SHAPES[:3], ids=spelled)
@pytest.mark.parametrize("reduction", [NONE, MEAN, SUM])
def test_likelihoods_taken_apart_give_the_same(
    logits: tuple[int, ...], target: tuple[int, ...], reduction: int
) -> None:
    for weight in (None, positives(7)):
        for ignored in (-100, 3):
            given = classes(*target, ignored=ignored if target else 1)
            take_apart(NLLS[1], learned(*logits), given, weight, reduction, ignored)
            if len(logits) == 2:
                take_apart(NLLS[0], learned(*logits), given, weight, reduction, ignored)
                forward = aten.nll_loss_forward.default
                take_apart(forward, learned(*logits), given, weight, reduction, ignored)


def test_impossible_classes_and_ignored_batches_come_out_as_torch_has_them() -> None:
    logits = numbers(4, 7)
    logits[:, 2] = -torch.inf
    target = torch.tensor([0, 1, 3, 4])
    take_apart(CROSS_ENTROPY, logits.requires_grad_(), target)
    take_apart(CROSS_ENTROPY, learned(4, 7), torch.full((4,), -100))


def test_half_precision_is_widened_as_torch_widens_it() -> None:
    take_apart(CROSS_ENTROPY, (numbers(16, 7) * 8).bfloat16(), classes(16))


def loss(logits: torch.Tensor, target: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = find_decomposition(CROSS_ENTROPY)(
        logits, target, weight, MEAN, -100, 0.1
    )
    return result


@pytest.mark.parametrize(
    ("cuts", "exchanged", "result"),
    [
        # The losses, and what they weigh.
        ([Shard(0), Shard(0), R], ["P", "P"], R),
        ([Shard(2), Shard(1), R], ["P", "P"], R),
        # The largest, the sum of exponentials, the class's, its weight, and those of all classes.
        ([Shard(1), R, Shard(0)], ["P(max)", "P", "P", "P", "P"], R),
        ([Shard(1), R, R], ["P(max)", "P"], Partial()),
    ],
    ids=spelled,
)
def test_logits_are_never_gathered(
    cuts: list[Placement], exchanged: list[str], result: Placement
) -> None:
    tensors = [numbers(4, 6, 2), classes(4, 2) % 6, positives(6)]
    assert cut_through(loss, tensors, cuts) == (exchanged, result)
