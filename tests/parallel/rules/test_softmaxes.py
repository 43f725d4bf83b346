"""Softmax and norms of layers: along other dims as they are, along their own taken apart."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rule_proof import refute
from rule_proving import claims, numbers, spelled
from rule_sample import make_sample
from shardscope.parallel.placements import Shard
from shardscope.parallel.rules.call import Strategy

aten = torch.ops.aten
SOFTMAXES = [
    (aten.softmax.int, ()),
    (aten.log_softmax.int, ()),
    (aten._softmax.default, (False,)),
    (aten._log_softmax.default, (False,)),
    (aten.special_softmax.default, ()),
    (aten._safe_softmax.default, ()),
]


@pytest.mark.parametrize(("op", "more"), SOFTMAXES, ids=spelled)
@pytest.mark.parametrize("dim", [1, -2])
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_softmax_leaves_its_own_dim_whole(
    op: Any, more: tuple[Any, ...], dim: int, num_ranks: int
) -> None:
    found = claims(op, numbers(4, 6, 5), dim, *more, sizes=[num_ranks])
    assert {"S(0) -> S(0)", "S(2) -> S(2)"} <= found
    assert not any(one.startswith("S(1") or "P" in one for one in found)


@pytest.mark.parametrize(("op", "more"), SOFTMAXES, ids=spelled)
def test_softmax_of_pieces_of_its_own_dim_is_refuted(op: Any, more: tuple[Any, ...]) -> None:
    wrong = Strategy((Shard(1),), (Shard(1),))
    sample = make_sample(op, [numbers(4, 6), 1, *more])
    assert refute(sample, [wrong], sizes=[2]) is not None


@pytest.mark.parametrize("sizes", [[2], [3], [2, 2]], ids=spelled)
def test_layers_are_normalised_on_pieces_of_the_leading_dims(sizes: list[int]) -> None:
    whole, weight, bias = numbers(4, 8, 6), numbers(6), numbers(6)
    zeroth = "; ".join(["S(0) R R -> S(0)", "S(1) R R -> S(1)"][: len(sizes)])
    found = claims(aten.layer_norm.default, whole, [6], weight, bias, sizes=sizes)
    assert zeroth in found
    assert not any("S(2" in one for one in found)


def test_every_result_of_a_norm_is_cut() -> None:
    whole, weight, bias = numbers(4, 5, 6), numbers(5, 6), numbers(5, 6)
    both = claims(aten.native_layer_norm.default, whole, [5, 6], weight, bias, 1e-5)
    assert "S(0) R R -> S(0) S(0) S(0)" in both
    assert not any("S(1" in one for one in both)
    rms = claims(aten._fused_rms_norm.default, numbers(4, 5, 6), [6], numbers(6), 1e-5)
    assert {"S(0) R -> S(0) S(0)", "S(1) R -> S(1) S(1)"} <= rms
    assert "S(1) -> S(1)" in claims(aten.rms_norm.default, numbers(4, 5, 6), [6])


def test_a_norm_without_weights_is_cut_too() -> None:
    assert "S(0) -> S(0)" in claims(aten.layer_norm.default, numbers(4, 6), [6])
    found = claims(aten.layer_norm.default, numbers(4, 6), [6], None, numbers(6))
    assert "S(0) R -> S(0)" in found
