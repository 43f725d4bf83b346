"""Batch norm by channels; by batch where statistics are given, or as sums over all ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rule_proving import claims, cut_through, learned, numbers, plain, positives, take_apart
from shardscope.parallel.placements import Partial, Replicate, Shard
from shardscope.parallel.rules.lookup import find_decomposition

aten = torch.ops.aten
FUNCTIONAL = aten._native_batch_norm_legit_functional.default
WITHOUT_HISTORY = aten._native_batch_norm_legit.no_stats
HISTORY = ("running_mean", "running_var")
R = Replicate()


def statistics(num_channels: int) -> tuple[torch.Tensor, torch.Tensor]:
    return numbers(num_channels), positives(num_channels)


def affine(num_channels: int) -> tuple[torch.Tensor, torch.Tensor]:
    return numbers(num_channels), numbers(num_channels)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_with_given_statistics_samples_and_pixels_may_be_cut(num_ranks: int) -> None:
    found = claims(
        *(aten.batch_norm.default, numbers(5, 6, 5), *affine(6), *statistics(6)),
        *(False, 0.1, 1e-5, False),
        sizes=[num_ranks],
        constants=HISTORY,
    )
    assert plain(found) == {
        *("S(1) S(0) S(0) S(0) S(0) -> S(1)", "S(0) R R R R -> S(0)", "S(2) R R R R -> S(2)"),
    }


def test_statistics_of_the_batch_leave_only_channels_to_cut() -> None:
    found = claims(
        *(aten.batch_norm.default, numbers(4, 6), None, None, None, None),
        *(True, 0.1, 1e-5, False),
    )
    assert plain(found) == {"S(1) -> S(1)"}


def test_the_functional_op_cuts_its_new_statistics_with_the_channels() -> None:
    found = claims(
        *(FUNCTIONAL, numbers(4, 6, 3), *affine(6), *statistics(6), True, 0.1, 1e-5),
        sizes=[3],
        constants=HISTORY,
    )
    assert plain(found) == {
        "S(1) S(0) S(0) S(0) S(0) -> S(1) S(0) S(0) S(0) S(0)",
    }


def test_statistics_that_were_not_computed_are_empty_and_whole() -> None:
    op = aten._native_batch_norm_legit_no_training.default
    found = claims(
        *(op, numbers(4, 6, 3), *affine(6), *statistics(6), 0.1, 1e-5), constants=HISTORY
    )
    assert {
        "S(1) S(0) S(0) S(0) S(0) -> S(1) R R",
        "S(0) R R R R -> S(0) R R",
    } <= found
    found = claims(WITHOUT_HISTORY, numbers(4, 6, 3), *affine(6), True, 0.1, 1e-5)
    assert plain(found) == {"S(1) S(0) S(0) -> S(1) S(0) S(0)"}


@pytest.mark.parametrize("shape", [(5, 3), (4, 3, 2), (3, 3, 2, 2)])
@pytest.mark.parametrize("has_affine", [True, False])
def test_taken_apart_it_gives_results_and_history_as_torch_does(
    shape: tuple[int, ...], has_affine: bool
) -> None:
    given = (learned(3), learned(3)) if has_affine else (None, None)
    take_apart(FUNCTIONAL, learned(*shape), *given, *statistics(3), True, 0.3, 1e-4)
    take_apart(WITHOUT_HISTORY, learned(*shape), *given, True, 0.3, 1e-4)
    rest = (None, None, True, 0.3, 1e-4, False)
    take_apart(aten.batch_norm.default, learned(*shape), *given, *rest)


def test_half_precision_keeps_statistics_as_torch_keeps_them() -> None:
    wide = [one.float() for one in (*affine(3), *statistics(3))]
    take_apart(FUNCTIONAL, numbers(8, 3, 2).bfloat16(), *wide, True, 0.1, 1e-5)


def test_a_cut_batch_costs_two_sums_of_one_number_a_channel() -> None:
    def normalize(x: torch.Tensor, weight: torch.Tensor, mean: torch.Tensor) -> Any:
        return find_decomposition(FUNCTIONAL)(x, weight, weight, mean, mean, True, 0.1, 1e-5)

    tensors = [numbers(4, 3, 2), numbers(3), positives(3)]
    assert cut_through(normalize, tensors, [Shard(0), R, R]) == ([str(Partial())] * 2, Shard(0))


def test_a_history_in_inference_or_one_that_is_written_to_is_left_to_torch() -> None:
    with pytest.raises(NotImplementedError):
        find_decomposition(FUNCTIONAL)(numbers(4, 3), None, None, *statistics(3), False, 0.1, 1e-5)
    with pytest.raises(NotImplementedError):
        find_decomposition(aten.batch_norm.default)(
            numbers(4, 3), None, None, *statistics(3), True, 0.1, 1e-5, False
        )


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_instances_are_normalized_each_for_itself(num_ranks: int) -> None:
    op, x, rest = aten.instance_norm.default, numbers(5, 5, 3), (0.1, 1e-5, False)
    found = claims(op, x, *affine(5), None, None, True, *rest, sizes=[num_ranks])
    assert plain(found) == {"S(0) R R -> S(0)", "S(1) S(0) S(0) -> S(1)"}
    assert claims(op, x, None, None, *statistics(5), True, *rest, constants=HISTORY) == set()
    found = claims(op, x, None, None, *statistics(5), False, *rest, constants=HISTORY)
    assert {"S(0) R R -> S(0)", "S(1) S(0) S(0) -> S(1)"} <= found


def test_instances_taken_apart_give_the_same() -> None:
    for given in ((None, None), (learned(3), learned(3))):
        rest = (None, None, True, 0.1, 1e-4, False)
        take_apart(aten.instance_norm.default, learned(4, 3, 5), *given, *rest)
