"""Distances, similarities and gates: along other dims, or along their own in a known way."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rule_proving import claims, cut_through, numbers, plain, spelled
from shardscope.parallel.placements import Shard
from shardscope.parallel.rules.lookup import find_decomposition

aten = torch.ops.aten


@pytest.mark.parametrize("dim", [1, -2])
def test_similar_vectors_are_compared_where_they_are_whole(dim: int) -> None:
    found = claims(aten.cosine_similarity.default, numbers(4, 5, 6), numbers(5, 1), dim)
    assert plain(found) == {"S(0) R -> S(0)", "S(2) R -> S(1)"}
    both = claims(aten.cosine_similarity.default, numbers(4, 5, 6), numbers(4, 5, 6), dim)
    assert {"S(0) S(0) -> S(0)", "S(2) S(2) -> S(1)"} <= both


@pytest.mark.parametrize("keepdim", [False, True])
def test_distances_of_pairs(keepdim: bool) -> None:
    found = claims(aten.pairwise_distance.default, numbers(4, 2, 6), numbers(6), 2.0, 1e-6, keepdim)
    assert plain(found) == {"S(0) R -> S(0)", "S(1) R -> S(1)"}


def test_distances_of_all_to_all() -> None:
    found = claims(aten.cdist.default, numbers(2, 4, 3), numbers(2, 6, 3))
    assert plain(found) == {"S(0) S(0) -> S(0)", "S(1) R -> S(1)", "R S(1) -> S(2)"}
    shared = claims(aten.cdist.default, numbers(2, 4, 3), numbers(6, 3), sizes=[3])
    assert "R S(0) -> S(2)" in shared


def test_cross_products_leave_their_three_together() -> None:
    found = claims(
        aten.linalg_cross.default, numbers(4, 3, 6), numbers(1, 3, 6), kwargs={"dim": -2}
    )
    assert plain(found) == {"S(0) R -> S(0)", "S(2) S(2) -> S(2)"}


PARTS = [
    (aten.cosine_similarity.default, ((4, 6), (6,)), {"dim": -1}),
    (aten.cosine_similarity.default, ((4, 6), (4, 6)), {"dim": 0, "eps": 0.5}),
    (aten.pairwise_distance.default, ((4, 6), (4, 6)), {"p": 1.0, "keepdim": True}),
    (aten.dist.default, ((4, 6), (6,)), {"p": 3}),
]


@pytest.mark.parametrize(("op", "shapes", "kwargs"), PARTS, ids=spelled)
def test_parts_give_the_values_of_the_whole(
    op: Any, shapes: tuple[tuple[int, ...], ...], kwargs: dict[str, Any]
) -> None:
    tensors = [numbers(*shape) for shape in shapes]
    apart = find_decomposition(op)(*tensors, **kwargs)
    torch.testing.assert_close(apart, op(*tensors, **kwargs))


def test_parts_of_cut_vectors_gather_nothing() -> None:
    apart = find_decomposition(aten.cosine_similarity.default)
    reduced, _ = cut_through(
        lambda one, other: apart(one, other, -1),
        [numbers(4, 6), numbers(4, 6)],
        [Shard(1), Shard(1)],
    )
    assert reduced == ["P", "P"]


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("dim", [1, -1])
def test_a_gate_is_cut_with_what_it_gates(num_ranks: int, dim: int) -> None:
    offers = [(Shard(1, segments=(6, 6, 6, 6)),), (Shard(1, segments=(12, 12)),)]
    offers += [(Shard(1, segments=(12, 6, 6)),)]
    found = claims(aten.glu.default, numbers(4, 24), dim, sizes=[num_ranks], offers=offers)
    assert {"S(0) -> S(0)", "S(1, 2x) -> S(1)", "S(1, 4x) -> S(1, 2x)"} <= found
    assert {"S(1, (6, 6, 6, 6)) -> S(1, (6, 6))", "S(1, (12, 12)) -> S(1)"} <= found
    assert not any(one.startswith(("S(1) ", "S(1, (12, 6")) for one in found)


def test_what_is_overwritten_lends_its_shape() -> None:
    found = claims(aten.copy.default, numbers(4, 6), numbers(6))
    assert {"S(1) S(0) -> S(1)", "S(0) R -> S(0)", "R P -> P", "P P -> P"} >= plain(found)
    assert "R P -> P" in found
    narrowed = claims(aten.copy.default, numbers(4).float(), numbers(4))
    assert plain(narrowed) == {"S(0) S(0) -> S(0)"}
