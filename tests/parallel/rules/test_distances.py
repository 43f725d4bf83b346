"""Distances, similarities and glu are sharded along other dims, or along their own dim by a
decomposition.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rule_proving import numbers, propagate_shards, prove_strategies, stable_id, without_blocks
from shardscope.parallel.sharding_rules.registry import find_decomposition
from shardscope.plan.placements import Shard

aten = torch.ops.aten


@pytest.mark.parametrize("dim", [1, -2])
def test_cosine_similarity_does_not_shard_the_vector_dim(dim: int) -> None:
    strategies = prove_strategies(
        aten.cosine_similarity.default, numbers(4, 5, 6), numbers(5, 1), dim
    )
    assert without_blocks(strategies) == {"S(0) R -> S(0)", "S(2) R -> S(1)"}
    both = prove_strategies(aten.cosine_similarity.default, numbers(4, 5, 6), numbers(4, 5, 6), dim)
    assert {"S(0) S(0) -> S(0)", "S(2) S(2) -> S(1)"} <= both


@pytest.mark.parametrize("keepdim", [False, True])
def test_distances_of_pairs(keepdim: bool) -> None:
    strategies = prove_strategies(
        aten.pairwise_distance.default, numbers(4, 2, 6), numbers(6), 2.0, 1e-6, keepdim
    )
    assert without_blocks(strategies) == {"S(0) R -> S(0)", "S(1) R -> S(1)"}


def test_distances_of_all_to_all() -> None:
    strategies = prove_strategies(aten.cdist.default, numbers(2, 4, 3), numbers(2, 6, 3))
    assert without_blocks(strategies) == {"S(0) S(0) -> S(0)", "S(1) R -> S(1)", "R S(1) -> S(2)"}
    shared = prove_strategies(aten.cdist.default, numbers(2, 4, 3), numbers(6, 3), sizes=[3])
    assert "R S(0) -> S(2)" in shared


def test_cross_products_do_not_shard_their_dim() -> None:
    strategies = prove_strategies(
        aten.linalg_cross.default, numbers(4, 3, 6), numbers(1, 3, 6), kwargs={"dim": -2}
    )
    assert without_blocks(strategies) == {"S(0) R -> S(0)", "S(2) S(2) -> S(2)"}


PARTS = [
    (aten.cosine_similarity.default, ((4, 6), (6,)), {"dim": -1}),
    (aten.cosine_similarity.default, ((4, 6), (4, 6)), {"dim": 0, "eps": 0.5}),
    (aten.pairwise_distance.default, ((4, 6), (4, 6)), {"p": 1.0, "keepdim": True}),
    (aten.dist.default, ((4, 6), (6,)), {"p": 3}),
]


@pytest.mark.parametrize(("op", "shapes", "kwargs"), PARTS, ids=stable_id)
def test_decompositions_give_the_ops_values(
    op: Any, shapes: tuple[tuple[int, ...], ...], kwargs: dict[str, Any]
) -> None:
    tensors = [numbers(*shape) for shape in shapes]
    apart = find_decomposition(op)(*tensors, **kwargs)
    torch.testing.assert_close(apart, op(*tensors, **kwargs))


def test_decompositions_of_sharded_vectors_gather_nothing() -> None:
    apart = find_decomposition(aten.cosine_similarity.default)
    reduced, _ = propagate_shards(
        lambda left, right: apart(left, right, -1),
        [numbers(4, 6), numbers(4, 6)],
        [Shard(1), Shard(1)],
    )
    assert reduced == ["P", "P"]


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("dim", [1, -1])
def test_both_halves_of_glu_are_sharded_equally(num_ranks: int, dim: int) -> None:
    candidate_placements = [(Shard(1, segments=(6, 6, 6, 6)),), (Shard(1, segments=(12, 12)),)]
    candidate_placements += [(Shard(1, segments=(12, 6, 6)),)]
    strategies = prove_strategies(
        aten.glu.default,
        numbers(4, 24),
        dim,
        sizes=[num_ranks],
        candidate_placements=candidate_placements,
    )
    assert {"S(0) -> S(0)", "S(1, 2x) -> S(1)", "S(1, 4x) -> S(1, 2x)"} <= strategies
    assert {"S(1, (6, 6, 6, 6)) -> S(1, (6, 6))", "S(1, (12, 12)) -> S(1)"} <= strategies
    assert not any(strategy.startswith(("S(1) ", "S(1, (12, 6")) for strategy in strategies)


def test_only_the_shape_of_an_overwritten_tensor_matters() -> None:
    strategies = prove_strategies(aten.copy.default, numbers(4, 6), numbers(6))
    assert {"S(1) S(0) -> S(1)", "S(0) R -> S(0)", "R P -> P", "P P -> P"} >= without_blocks(
        strategies
    )
    assert "R P -> P" in strategies
    narrowed = prove_strategies(aten.copy.default, numbers(4).float(), numbers(4))
    assert without_blocks(narrowed) == {"S(0) S(0) -> S(0)"}
