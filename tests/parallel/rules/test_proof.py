"""The proof harness accepts true strategies and refutes plausible wrong strategies."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rule_proof import refute
from rule_proving import numbers
from rule_sample import make_sample
from shardscope.parallel.ir.graph import Strategy
from shardscope.parallel.ir.shard_spec import shard_tensor, unshard_tensor
from shardscope.parallel.sharding_rules.registry import find_rule
from shardscope.plan.placements import Partial, Placement, Replicate, Shard

aten = torch.ops.aten
R, P = Replicate(), Partial()


def strategy(inputs: list[Placement], outputs: list[Placement]) -> Strategy:
    return Strategy(tuple(inputs), tuple(outputs))


@pytest.mark.parametrize(
    "placement",
    [
        *(R, P, Partial("max"), Partial("min")),
        *(Shard(0), Shard(1), Shard(1, 2), Shard(1, 3), Shard(1, segments=(6, 4, 2))),
    ],
    ids=str,
)
@pytest.mark.parametrize("num_ranks", [2, 3, 5])
def test_unsharding_restores_the_sharded_tensor(placement: Placement, num_ranks: int) -> None:
    full_tensor = numbers(4, 12)
    sizes = (2, num_ranks)
    for placements in ((R, placement), (placement, P), (Shard(0), placement)):
        shards = shard_tensor(full_tensor, placements=placements, sizes=sizes)
        assert len(shards) == 2 * num_ranks
        torch.testing.assert_close(
            unshard_tensor(shards, placements=placements, sizes=sizes), full_tensor
        )


def test_sharding_in_blocks_gives_each_rank_its_shard_of_every_block() -> None:
    full_tensor = torch.arange(8)
    shards = shard_tensor(full_tensor, placements=[Shard(0, 2)], sizes=[2])
    assert shards[0,].tolist() == [0, 1, 4, 5]
    segments = shard_tensor(full_tensor, placements=[Shard(0, segments=(4, 2, 2))], sizes=[2])
    assert segments[1,].tolist() == [2, 3, 5, 7]


def test_replicated_shards_that_differ_are_not_unsharded() -> None:
    shards = {(0,): torch.ones(2), (1,): torch.zeros(2)}
    with pytest.raises(ValueError, match="should hold the same value"):
        unshard_tensor(shards, placements=[R], sizes=[2])


TRUE = {
    "mm by rows": (aten.mm.default, [(4, 6), (6, 5)], [Shard(0), R], [Shard(0)]),
    "mm by columns": (aten.mm.default, [(4, 6), (6, 5)], [R, Shard(1)], [Shard(1)]),
    "mm inside": (aten.mm.default, [(4, 6), (6, 5)], [Shard(1), Shard(0)], [P]),
    "mm inside, in blocks": (aten.mm.default, [(4, 6), (6, 5)], [Shard(1, 3), Shard(0, 3)], [P]),
    "mm of addends": (aten.mm.default, [(4, 6), (6, 5)], [P, R], [P]),
    "add of addends": (aten.add.Tensor, [(4, 6), (4, 6)], [P, P], [P]),
}
FALSE = {
    "mm inside, called whole": (aten.mm.default, [(4, 6), (6, 5)], [Shard(1), Shard(0)], [R]),
    "mm of mismatched cuts": (aten.mm.default, [(4, 6), (6, 5)], [Shard(1), Shard(0, 3)], [P]),
    "mm of addends twice": (aten.mm.default, [(4, 6), (6, 5)], [P, P], [P]),
    "add of addends and a whole": (aten.add.Tensor, [(4, 6), (4, 6)], [P, R], [P]),
    "exp of addends": (aten.exp.default, [(4, 6)], [P], [P]),
    "relu of addends": (aten.relu.default, [(4, 6)], [P], [P]),
    "a product that is not cut": (aten.mul.Tensor, [(4, 6), (4, 6)], [R, R], [P]),
}


@pytest.mark.parametrize("case", TRUE)
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_true_strategy_passes(case: str, num_ranks: int) -> None:
    op, shapes, inputs, outputs = TRUE[case]
    sample = make_sample(op, [numbers(*shape) for shape in shapes])
    chosen = [strategy(inputs, outputs)]
    assert refute(sample, chosen, sizes=[num_ranks], is_training=True) is None


@pytest.mark.parametrize("case", FALSE)
def test_a_false_strategy_is_refuted(case: str) -> None:
    op, shapes, inputs, outputs = FALSE[case]
    sample = make_sample(op, [numbers(*shape) for shape in shapes])
    assert refute(sample, [strategy(inputs, outputs)], sizes=[2]) is not None


def test_softmax_along_a_sharded_dim_is_refuted() -> None:
    sample = make_sample(aten.softmax.int, [numbers(4, 6), -1])
    along_softmax_dim = strategy([Shard(1)], [Shard(1)])
    assert "output 0 differs" in str(refute(sample, [along_softmax_dim], sizes=[2]))
    along_batch_dim = strategy([Shard(0)], [Shard(0)])
    assert refute(sample, [along_batch_dim], sizes=[2], is_training=True) is None


def test_a_size_argument_of_the_full_tensor_is_refuted() -> None:
    sample = make_sample(aten.view.default, [numbers(4, 6), [2, 2, 6]])
    # The op has a lowering; with the full tensor's sizes, a view of the shard is impossible.
    refutation = refute(sample, [strategy([Shard(1)], [Shard(1)])], sizes=[2])
    assert refutation is not None


def test_what_only_the_gradient_gets_wrong_is_refuted_for_training_alone() -> None:
    sample = make_sample(aten.amax.default, [numbers(4, 6), [1]])
    chosen = [strategy([Shard(1)], [Partial("max")])]
    assert refute(sample, chosen, sizes=[2]) is None
    assert "the gradient of input 0 differs" in str(
        refute(sample, chosen, sizes=[2], is_training=True)
    )


def test_two_axes_are_proved_together() -> None:
    sample = make_sample(aten.mm.default, [numbers(4, 8), numbers(8, 6)])
    rows, inside = strategy([Shard(0), R], [Shard(0)]), strategy([Shard(1), Shard(0)], [P])
    columns = strategy([R, Shard(1)], [Shard(1)])
    for chosen in ([rows, inside], [inside, inside], [inside, columns], [rows, columns]):
        assert refute(sample, chosen, sizes=[2, 2], is_training=True) is None
    wrongly_replicated = strategy([Shard(1), Shard(0)], [R])
    assert refute(sample, [rows, wrongly_replicated], sizes=[2, 2]) is not None


def test_an_axis_with_replicated_inputs_leaves_gradients_replicated() -> None:
    sample = make_sample(aten.mul.Tensor, [numbers(4, 6), numbers(4, 6)])
    replicated, rows = strategy([R, R], [R]), strategy([Shard(0), Shard(0)], [Shard(0)])
    assert refute(sample, [replicated, rows], sizes=[2, 2], is_training=True) is None


def test_proving_preserves_the_callers_random_state() -> None:
    sample = make_sample(aten.mm.default, [numbers(4, 6), numbers(6, 5)])
    before = torch.get_rng_state()
    for _ in range(2):
        assert refute(sample, [strategy([P, R], [P])], sizes=[2], is_training=True) is None
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    "op",
    [
        *(aten.copy.default, aten.median.dim, aten.nanmedian.dim, aten.mode.default),
        *(aten.kthvalue.default, aten.slice_scatter.default, aten.select_scatter.default),
        *(aten.diagonal_scatter.default, aten.isin.Tensor_Tensor, aten.broadcast_tensors.default),
    ],
    ids=str,
)
def test_ops_between_families_have_a_rule(op: Any) -> None:
    assert find_rule(op) is not None
