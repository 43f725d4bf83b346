"""Every rank draws what the single device draws, and takes its shard of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from rule_proving import decompose, numbers, prove_strategies, stable_id, trainable, without_blocks
from rule_sample import Sample, make_sample
from shardscope.parallel.ir.shard_spec import MeshCoordinate, ShardSpec
from shardscope.parallel.sharding_rules.random import is_random
from shardscope.parallel.sharding_rules.registry import find_rule
from shardscope.plan.placements import Partial, Shard

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


@pytest.mark.parametrize("op", DROPOUTS, ids=stable_id)
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_dropout_is_sharded_along_any_dim_and_partial(op: Any, num_ranks: int) -> None:
    strategies = prove_strategies(op, numbers(4, 6, 5), 0.5, True, sizes=[num_ranks])
    assert without_blocks(strategies) == {"S(0) -> S(0)", "S(1) -> S(1)", "S(2) -> S(2)", "P -> P"}


@pytest.mark.parametrize(("p", "train"), [(0.5, False), (0.0, True), (1.0, True)])
def test_dropout_that_draws_nothing(p: float, train: bool) -> None:
    for op in DROPOUTS:
        assert {"S(1) -> S(1)", "P -> P"} <= prove_strategies(op, numbers(4, 6), p, train)


def test_the_mask_of_dropout_is_sharded_with_its_result() -> None:
    for train in (True, False):
        strategies = prove_strategies(aten.native_dropout.default, numbers(4, 6), 0.5, train)
        assert without_blocks(strategies) == {"S(0) -> S(0) S(0)", "S(1) -> S(1) S(1)"}


def test_two_axes_shard_the_same_mask() -> None:
    strategies = prove_strategies(aten.dropout.default, numbers(4, 4), 0.5, True, sizes=[2, 2])
    assert {"S(0) -> S(0); S(1) -> S(1)", "S(1) -> S(1); S(1) -> S(1)"} <= strategies


@pytest.mark.parametrize("index", range(5))
@pytest.mark.parametrize(
    ("op", "args"),
    [
        (aten.dropout.default, (0.5, True)),
        (aten.native_dropout.default, (0.5, True)),
        (aten.randn_like.default, ()),
    ],
    ids=stable_id,
)
def test_random_numbers_follow_the_single_devices_memory_order(
    op: Any, args: tuple[Any, ...], index: int
) -> None:
    assert len(prove_strategies(op, orders_in_memory()[index], *args)) > 5


def test_generators_advance_as_on_the_single_device() -> None:
    full_tensor = numbers(4, 6)
    for op, args in ((aten.dropout.default, (0.3, True)), (aten.rand_like.default, ())):
        torch.manual_seed(3)
        sample = make_sample(op, (full_tensor, *args))
        state, following = torch.get_rng_state(), torch.rand(3)
        for rank in range(3):
            torch.manual_seed(3)
            run(sample, full_tensor[rank * 2 : rank * 2 + 2], [rank])
            assert torch.equal(torch.get_rng_state(), state)
            assert torch.equal(torch.rand(3), following)


def run(sample: Sample, shard: torch.Tensor, at: Sequence[int]) -> torch.Tensor:
    shard_spec = ShardSpec((4, 6), (Shard(0),))
    shard_specs = ((shard_spec,), (shard_spec,))
    (result,) = sample.run_locally(
        [shard], shard_specs=shard_specs, coordinate=MeshCoordinate((3,), tuple(at))
    )
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


@pytest.mark.parametrize(("op", "args"), LIKE, ids=stable_id)
def test_random_like_ops_take_a_shard_of_the_full_draw(op: Any, args: tuple[Any, ...]) -> None:
    strategies = prove_strategies(
        op, numbers(4, 3), *args, candidate_placements=[(Partial(),)], sizes=[3], constants=["self"]
    )
    assert {"S(0) -> S(0)", "S(1) -> S(1)", "P -> R"} <= strategies


def test_other_random_ops_run_on_replicated_tensors() -> None:
    for op in (aten.bernoulli.default, aten.multinomial.default, aten.poisson.default):
        assert is_random(op)
        assert find_rule(op) is None
    slopes = (numbers(4, 3), 0.1, 0.3)
    assert prove_strategies(aten.rrelu.default, *slopes, True) == set()
    assert without_blocks(prove_strategies(aten.rrelu.default, *slopes, False)) == {
        "S(0) -> S(0)",
        "S(1) -> S(1)",
    }


def test_random_ops_are_recognized() -> None:
    assert is_random(aten.dropout.default)
    assert not is_random(aten.relu.default)
    assert not is_random(len)


def test_decomposed_alpha_dropout_draws_what_torch_draws() -> None:
    for p in (0.1, 0.5):
        decompose(aten.alpha_dropout.default, trainable(4, 6), p, True)
