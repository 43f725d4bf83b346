"""Every rank draws what the single device draws, and keeps its piece of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from rule_proving import claims, learned, numbers, plain, spelled, take_apart
from rule_sample import Sample, make_sample
from shardscope.parallel.layouts import Layout, Seat
from shardscope.parallel.placements import Partial, Shard
from shardscope.parallel.rules.lookup import find_rule
from shardscope.parallel.rules.randomness import is_random

aten = torch.ops.aten
DROPOUTS = [aten.dropout.default, aten.feature_dropout.default]


def orders_in_memory() -> list[torch.Tensor]:
    return [
        numbers(4, 6, 5),
        numbers(6, 4, 5).transpose(0, 1),
        numbers(5, 6, 4).permute(2, 1, 0),
        numbers(1, 6, 5).expand(4, 6, 5),
        numbers(4, 6, 10)[..., ::2],
    ]


@pytest.mark.parametrize("op", DROPOUTS, ids=spelled)
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_dropout_runs_on_any_piece_and_on_addends(op: Any, num_ranks: int) -> None:
    found = claims(op, numbers(4, 6, 5), 0.5, True, sizes=[num_ranks])
    assert plain(found) == {"S(0) -> S(0)", "S(1) -> S(1)", "S(2) -> S(2)", "P -> P"}


@pytest.mark.parametrize(("p", "train"), [(0.5, False), (0.0, True), (1.0, True)])
def test_dropout_that_draws_nothing(p: float, train: bool) -> None:
    for op in DROPOUTS:
        assert {"S(1) -> S(1)", "P -> P"} <= claims(op, numbers(4, 6), p, train)


def test_the_mask_of_a_dropout_is_cut_with_its_result() -> None:
    for train in (True, False):
        found = claims(aten.native_dropout.default, numbers(4, 6), 0.5, train)
        assert plain(found) == {"S(0) -> S(0) S(0)", "S(1) -> S(1) S(1)"}


def test_two_axes_keep_pieces_of_one_mask() -> None:
    found = claims(aten.dropout.default, numbers(4, 4), 0.5, True, sizes=[2, 2])
    assert {"S(0) -> S(0); S(1) -> S(1)", "S(1) -> S(1); S(1) -> S(1)"} <= found


@pytest.mark.parametrize("index", range(5))
@pytest.mark.parametrize(
    ("op", "args"),
    [
        (aten.dropout.default, (0.5, True)),
        (aten.native_dropout.default, (0.5, True)),
        (aten.randn_like.default, ()),
    ],
    ids=spelled,
)
def test_draws_follow_the_single_devices_memory(op: Any, args: tuple[Any, ...], index: int) -> None:
    assert len(claims(op, orders_in_memory()[index], *args)) > 5


def test_generators_stand_where_the_single_devices_stands() -> None:
    whole = numbers(4, 6)
    for op, args in ((aten.dropout.default, (0.3, True)), (aten.rand_like.default, ())):
        torch.manual_seed(3)
        sample = make_sample(op, (whole, *args))
        state, following = torch.get_rng_state(), torch.rand(3)
        for rank in range(3):
            torch.manual_seed(3)
            run(sample, whole[rank * 2 : rank * 2 + 2], [rank])
            assert torch.equal(torch.get_rng_state(), state)
            assert torch.equal(torch.rand(3), following)


def run(sample: Sample, piece: torch.Tensor, at: Sequence[int]) -> torch.Tensor:
    layout = Layout((4, 6), (Shard(0),))
    layouts = ((layout,), (layout,))
    (result,) = sample.run_locally([piece], layouts=layouts, seat=Seat((3,), tuple(at)))
    return result


LIKE = [
    (aten.rand_like.default, ()),
    (aten.randn_like.default, ()),
    (aten.randint_like.default, (10,)),
    (aten.randint_like.low_dtype, (3, 10)),
    (aten.bernoulli.p, (0.3,)),
    (aten.normal_functional.default, (1.0, 2.0)),
    (aten.uniform.default, (0.0, 3.0)),
    (aten.exponential.default, ()),
    (aten.geometric.default, (0.3,)),
]


@pytest.mark.parametrize(("op", "args"), LIKE, ids=spelled)
def test_draws_like_a_piece_are_a_piece_of_the_whole_draw(op: Any, args: tuple[Any, ...]) -> None:
    found = claims(op, numbers(4, 3), *args, offers=[(Partial(),)], sizes=[3], constants=["self"])
    assert {"S(0) -> S(0)", "S(1) -> S(1)", "P -> R"} <= found


def test_other_random_ops_run_on_whole_tensors() -> None:
    for op in (aten.bernoulli.default, aten.multinomial.default, aten.poisson.default):
        assert is_random(op)
        assert find_rule(op) is None
    slopes = (numbers(4, 3), 0.1, 0.3)
    assert claims(aten.rrelu.default, *slopes, True) == set()
    assert plain(claims(aten.rrelu.default, *slopes, False)) == {"S(0) -> S(0)", "S(1) -> S(1)"}


def test_what_draws_is_known() -> None:
    assert is_random(aten.dropout.default)
    assert not is_random(aten.relu.default)
    assert not is_random(len)


def test_alpha_dropout_taken_apart_draws_what_torch_draws() -> None:
    for p in (0.1, 0.5):
        take_apart(aten.alpha_dropout.default, learned(4, 6), p, True)
