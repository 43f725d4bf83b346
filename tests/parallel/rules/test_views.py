"""Views stay sharded if a new dim can be sharded into the same indices."""

from __future__ import annotations

from typing import Any

import pytest
import sympy
import torch

from rule_proving import numbers, prove_strategies, stable_id
from shardscope.parallel.sharding_rules.context import OpCall, TensorSpec
from shardscope.parallel.sharding_rules.registry import find_rule
from shardscope.parallel.sharding_rules.view import group_dims, reshape_shard
from shardscope.plan.placements import Placement, Replicate, Shard

aten = torch.ops.aten
VIEWS = [aten.view.default, aten.reshape.default, aten._unsafe_view.default]
PRESERVED = {"P -> P", "P(max) -> P(max)", "P(min) -> P(min)"}


@pytest.mark.parametrize("op", VIEWS, ids=stable_id)
def test_heads_stay_sharded_when_split_and_merged(op: Any) -> None:
    split = prove_strategies(op, numbers(2, 3, 8), [2, 3, 4, 2])
    assert {"S(0) -> S(0)", "S(2) -> S(2)", "S(2, 2x) -> S(2, 2x)", *PRESERVED} <= split
    merged = prove_strategies(op, numbers(2, 3, 4, 2), [2, 3, -1])
    assert {"S(0) -> S(0)", "S(2) -> S(2)", "S(3) -> S(2, 4x)", *PRESERVED} <= merged


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_flattened_batch_of_heads_stays_sharded_inside(num_ranks: int) -> None:
    flat = prove_strategies(aten.reshape.default, numbers(2, 6, 5), [12, 5], sizes=[num_ranks])
    assert "S(1) -> S(0, 2x)" in flat
    back = prove_strategies(aten.view.default, numbers(12, 5), [2, 6, 5], sizes=[num_ranks])
    assert "S(0, 2x) -> S(1)" in back


def test_dims_that_pass_through_may_be_uneven_and_in_blocks() -> None:
    strategies = prove_strategies(aten.view.default, numbers(5, 6, 4), [5, 6, 2, 2])
    assert {"S(0) -> S(0)", "S(1) -> S(1)", "S(1, 3x) -> S(1, 3x)"} <= strategies
    assert {"S(1, (2, 2, 2)) -> S(1, (2, 2, 2))"} <= strategies


def test_a_reshaped_dim_is_not_sharded_unevenly() -> None:
    strategies = prove_strategies(aten.view.default, numbers(6, 4), [2, 3, 4])
    assert "S(0) -> S(0)" in strategies
    three = prove_strategies(aten.view.default, numbers(6, 4), [2, 3, 4], sizes=[3])
    assert not any(strategy.startswith("S(0) ") for strategy in three)
    assert "S(0, 2x) -> S(1)" in three


def test_fused_queries_keys_and_values_of_different_sizes_become_heads() -> None:
    fused = [(Shard(1, segments=(16, 8, 8)),)]
    strategies = prove_strategies(
        aten.view.default, numbers(3, 32), [3, 8, 4], candidate_placements=fused
    )
    assert "S(1, (16, 8, 8)) -> S(1, (4, 2, 2))" in strategies
    heads = [(Shard(1, segments=(4, 2, 2)),)]
    back = prove_strategies(
        aten.reshape.default, numbers(3, 8, 4), [3, 32], candidate_placements=heads
    )
    assert "S(1, (4, 2, 2)) -> S(1, (16, 8, 8))" in back


def test_segments_of_equal_size_are_blocks() -> None:
    fused = [(Shard(1, segments=(8, 8, 8)),)]
    strategies = prove_strategies(
        aten.view.default, numbers(3, 24), [3, 3, 4, 2], candidate_placements=fused
    )
    assert "S(1, (8, 8, 8)) -> S(2)" in strategies


def test_segments_that_heads_do_not_divide_are_not_offered() -> None:
    fused = [(Shard(1, segments=(12, 6, 6)),)]
    strategies = prove_strategies(
        aten.view.default, numbers(3, 24), [3, 6, 4], candidate_placements=fused
    )
    assert not any(strategy.startswith("S(1, (12, 6, 6))") for strategy in strategies)


@pytest.mark.parametrize(
    ("op", "shape", "args"),
    [
        (aten.flatten.using_ints, (2, 4, 6), (0, 1)),
        (aten.flatten.using_ints, (2, 4, 6), (-2, -1)),
        (aten.flatten.using_ints, (2, 4, 6), ()),
        (aten.unflatten.int, (2, 8, 6), (1, [4, -1])),
        (aten.unflatten.int, (2, 8, 6), (-2, [2, 4])),
        (aten.squeeze.default, (1, 4, 1, 2), ()),
        (aten.squeeze.dim, (1, 4, 1, 2), (-2,)),
        (aten.squeeze.dim, (2, 4, 6), (0,)),
        (aten.squeeze.dims, (1, 4, 2, 2), ([0, -1],)),
        (aten.unsqueeze.default, (2, 4), (-1,)),
        (aten.unsqueeze.default, (2, 4), (1,)),
        (aten.ravel.default, (2, 4, 6), ()),
        (aten._reshape_alias.default, (4, 6), ([2, 2, 6], [12, 6, 1])),
        (aten.atleast_3d.default, (4, 6), ()),
        (aten.view.default, (4, 6), ([6, 4],)),
        (aten.view.default, (4, 6), ([-1],)),
        (aten.view.default, (24,), ([2, 3, 4],)),
        (aten.view.default, (1, 4, 1), ([4, 1],)),
        (aten.view.default, (2, 2, 2, 2, 2), ([4, 8],)),
        (aten.view.default, (4, 8), ([2, 2, 2, 2, 2],)),
        (aten.view.default, (0, 4), ([2, 2, 0],)),
    ],
    ids=stable_id,
)
@pytest.mark.parametrize("sizes", [[2], [3], [2, 2]], ids=stable_id)
def test_all_strategies_of_reshapes_are_true(
    op: Any, shape: tuple[int, ...], args: tuple[Any, ...], sizes: list[int]
) -> None:
    strategies = prove_strategies(op, numbers(*shape), *args, sizes=sizes)
    if len(sizes) == 1:
        assert strategies >= PRESERVED
    assert sizes == [3] or 0 in shape or any("S(" in strategy for strategy in strategies)


def test_a_shard_of_size_1_is_not_squeezed() -> None:
    assert "S(0) -> S(0)" in prove_strategies(aten.squeeze.default, numbers(2, 1, 4))
    assert "S(0) -> S(0)" in prove_strategies(aten.squeeze.dim, numbers(2, 1, 4), 0)


def test_view_as_reads_only_the_shape() -> None:
    for op in (aten.view_as.default, aten.reshape_as.default):
        strategies = prove_strategies(
            op, numbers(2, 8), numbers(2, 4, 2), candidate_placements=[(Shard(1), Shard(2))]
        )
        assert {"S(1) R -> S(1)", "S(1) S(2) -> S(1)"} <= strategies


@pytest.mark.parametrize(
    ("op", "args", "expected"),
    [
        (aten.permute.default, ([2, 0, -2],), {0: 1, 1: 2, 2: 0}),
        (aten.transpose.int, (-1, 0), {0: 2, 1: 1, 2: 0}),
        (aten.swapaxes.default, (0, 1), {0: 1, 1: 0, 2: 2}),
        (aten.swapdims.default, (1, -1), {0: 0, 1: 2, 2: 1}),
        (aten.mT.default, (), {0: 0, 1: 2, 2: 1}),
        (aten.adjoint.default, (), {0: 0, 1: 2, 2: 1}),
        (aten.movedim.int, (0, -1), {0: 2, 1: 0, 2: 1}),
        (aten.moveaxis.intlist, ([0, 1], [1, 2]), {0: 1, 1: 2, 2: 0}),
    ],
    ids=stable_id,
)
def test_permuted_dims_stay_sharded(
    op: Any, args: tuple[Any, ...], expected: dict[int, int]
) -> None:
    strategies = prove_strategies(op, numbers(2, 4, 5), *args)
    contiguous = {
        strategy for strategy in strategies if "x)" not in strategy and "P" not in strategy
    }
    assert contiguous == {f"S({old}) -> S({new})" for old, new in expected.items()}
    assert strategies >= PRESERVED


def test_small_transposes_are_known_too() -> None:
    assert "S(0) -> S(1)" in prove_strategies(aten.t.default, numbers(4, 6))
    assert "S(0) -> S(0)" in prove_strategies(aten.t.default, numbers(4))
    assert "S(0) -> S(1)" in prove_strategies(aten.mH.default, numbers(4, 6))


def test_a_diagonal_is_sharded_along_the_other_dims() -> None:
    strategies = prove_strategies(aten.diagonal.default, numbers(4, 3, 6, 3), 1, -3, -1)
    assert {"S(0) -> S(0)", "S(2) -> S(1)"} <= strategies
    assert not any(strategy.startswith(("S(1", "S(3")) for strategy in strategies)


B = sympy.Symbol("s0", integer=True, positive=True)


def ask(before: tuple[Any, ...], after: tuple[Any, ...], input_placement: Placement) -> list[Any]:
    """The strategies of the rule of views for symbolic sizes, as pairs of placements."""
    rule = find_rule(aten.view.default)
    assert rule is not None
    tensors = [TensorSpec(shape, torch.float32) for shape in (before, after)]
    call = OpCall(
        op=aten.view.default,
        arguments={"self": tensors[0], "size": list(after)},
        outputs=(tensors[1],),
        num_ranks=2,
        input_placements=(input_placement,),
    )
    return [(strategy.inputs[0], strategy.outputs[0]) for strategy in rule(call)]


def test_a_symbolic_batch_is_reshaped_with_its_heads() -> None:
    assert (Shard(1), Shard(0, outer=B)) in ask((B, 4, 8), (B * 4, 8), Replicate())
    assert (Shard(0, B), Shard(1)) in ask((B * 4, 8), (B, 4, 8), Shard(0, B))
    assert (Shard(2), Shard(2)) in ask((B, 3, 8), (B, 3, 4, 2), Replicate())
    assert (Shard(1), Shard(1)) in ask((B, 4, 2), (B, 8), Replicate())


def test_a_symbolic_dim_is_sharded_only_if_it_divides() -> None:
    assert (Shard(0), Shard(0)) in ask((2 * B, 4), (B * 2 * 4,), Replicate())
    assert not [old for old, _ in ask((B, 4), (B * 4,), Replicate()) if old == Shard(0)]


def test_dim_groups_span_the_same_indices() -> None:
    assert list(group_dims((2, 1, 3, 4), (6, 1, 4))) == [([0, 2], [0]), ([3], [2])]
    assert list(group_dims((), (1,))) == []
    assert reshape_shard(Shard(0), (6,), (2, 3), group=([0], [0, 1]), num_ranks=2) == Shard(0)
    assert reshape_shard(Shard(0), (6,), (2, 3), group=([0], [0, 1]), num_ranks=3) is None


def test_segments_of_another_size_are_not_reshaped() -> None:
    merged = {"before": (8, 4), "after": (32,), "group": ([0, 1], [0]), "num_ranks": 2}
    assert reshape_shard(Shard(0, segments=(4, 2, 2)), **merged) == Shard(0, segments=(16, 8, 8))
    assert reshape_shard(Shard(0, segments=(8, 4, 4)), **merged) is None
