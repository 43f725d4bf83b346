"""Matrix products are sharded along the result's indices, and partial along summed indices."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rule_proving import numbers, prove_strategies, stable_id, without_blocks
from shardscope.parallel.sharding_rules.registry import find_decomposition

aten = torch.ops.aten


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_linear_layer_without_bias_is_sharded_by_batch_features_out_and_features_in(
    num_ranks: int,
) -> None:
    strategies = prove_strategies(
        aten.linear.default, numbers(4, 5, 6), numbers(9, 6), sizes=[num_ranks]
    )
    assert without_blocks(strategies) == {
        *("S(0) R -> S(0)", "S(1) R -> S(1)", "R S(0) -> S(2)", "S(2) S(1) -> P"),
        *("P R -> P", "R P -> P"),
    }
    assert "S(2, 3x) S(1, 3x) -> P" in strategies or num_ranks == 3


def test_a_bias_is_sharded_with_the_features_or_partial_with_the_product() -> None:
    strategies = prove_strategies(aten.linear.default, numbers(4, 6), numbers(8, 6), numbers(8))
    assert without_blocks(strategies) == {
        *("S(0) R R -> S(0)", "R S(0) S(0) -> S(1)", "S(1) S(1) P -> P"),
        *("P R P -> P", "R P P -> P"),
    }


def test_a_vector_and_a_vector_of_weights() -> None:
    assert "S(0) S(1) -> P" in prove_strategies(aten.linear.default, numbers(6), numbers(8, 6))
    strategies = prove_strategies(aten.linear.default, numbers(4, 6), numbers(6))
    assert {"S(0) R -> S(0)", "S(1) S(0) -> P"} <= strategies


@pytest.mark.parametrize(
    ("left", "right", "expected"),
    [
        ((4, 6), (6, 8), {"S(0) R -> S(0)", "R S(1) -> S(1)", "S(1) S(0) -> P"}),
        ((6,), (6,), {"S(0) S(0) -> P"}),
        ((6,), (6, 8), {"R S(1) -> S(0)", "S(0) S(0) -> P"}),
        ((4, 6), (6,), {"S(0) R -> S(0)", "S(1) S(0) -> P"}),
        ((2, 4, 6), (2, 6, 8), {"S(0) S(0) -> S(0)", "S(1) R -> S(1)", "S(2) S(1) -> P"}),
        ((2, 4, 6), (6, 8), {"S(0) R -> S(0)", "R S(1) -> S(2)", "S(2) S(0) -> P"}),
        ((4, 6), (2, 6, 8), {"R S(0) -> S(0)", "S(0) R -> S(1)", "R S(2) -> S(2)"}),
        ((2, 1, 4, 6), (3, 6, 8), {"S(0) R -> S(0)", "R S(0) -> S(1)", "S(3) S(1) -> P"}),
        ((6,), (2, 6, 8), {"R S(0) -> S(0)", "R S(2) -> S(1)", "S(0) S(1) -> P"}),
        ((2, 4, 6), (6,), {"S(0) R -> S(0)", "S(1) R -> S(1)", "S(2) S(0) -> P"}),
    ],
    ids=stable_id,
)
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_matmul_of_any_two_shapes(
    left: tuple[int, ...], right: tuple[int, ...], expected: set[str], num_ranks: int
) -> None:
    strategies = prove_strategies(
        aten.matmul.default, numbers(*left), numbers(*right), sizes=[num_ranks]
    )
    assert strategies >= {*expected, "P R -> P", "R P -> P"}
    assert "P P -> P" not in strategies


PRODUCTS = [
    (aten.mm.default, [(4, 6), (6, 8)], "S(1) S(0) -> P"),
    (aten.bmm.default, [(2, 4, 6), (2, 6, 8)], "S(0) S(0) -> S(0)"),
    (aten.mv.default, [(4, 6), (6,)], "S(1) S(0) -> P"),
    (aten.dot.default, [(6,), (6,)], "S(0) S(0) -> P"),
    (aten.vdot.default, [(6,), (6,)], "S(0) S(0) -> P"),
    (aten.outer.default, [(4,), (6,)], "R S(0) -> S(1)"),
    (aten.inner.default, [(4, 6), (2, 6)], "R S(0) -> S(1)"),
    (aten.inner.default, [(3, 4, 6), (6,)], "S(2) S(0) -> P"),
]


@pytest.mark.parametrize(("op", "shapes", "expected"), PRODUCTS, ids=stable_id)
@pytest.mark.parametrize("sizes", [[2], [3], [2, 2]], ids=stable_id)
def test_matrix_and_vector_products(
    op: Any, shapes: list[tuple[int, ...]], expected: str, sizes: list[int]
) -> None:
    strategies = prove_strategies(op, *(numbers(*shape) for shape in shapes), sizes=sizes)
    assert expected in strategies or len(sizes) > 1
    assert any(expected in strategy for strategy in strategies)


SUMS = [
    (aten.addmm.default, [(8,), (4, 6), (6, 8)], "S(0) R S(1) -> S(1)"),
    (aten.addmm.default, [(4, 1), (4, 6), (6, 8)], "S(0) S(0) R -> S(0)"),
    (aten.addmm.default, [(4, 8), (4, 6), (6, 8)], "P S(1) S(0) -> P"),
    (aten.baddbmm.default, [(2, 4, 8), (2, 4, 6), (2, 6, 8)], "S(0) S(0) S(0) -> S(0)"),
    (aten.baddbmm.default, [(1, 8), (2, 4, 6), (2, 6, 8)], "R S(1) R -> S(1)"),
    (aten.addbmm.default, [(4, 8), (2, 4, 6), (2, 6, 8)], "P S(0) S(0) -> P"),
    (aten.addmv.default, [(4,), (4, 6), (6,)], "S(0) S(0) R -> S(0)"),
    (aten.addr.default, [(4, 6), (4,), (6,)], "S(1) R S(0) -> S(1)"),
]


@pytest.mark.parametrize(("op", "shapes", "expected"), SUMS, ids=stable_id)
@pytest.mark.parametrize("weights", [{}, {"beta": 0.5, "alpha": 3}], ids=stable_id)
def test_products_with_an_added_tensor(
    op: Any, shapes: list[tuple[int, ...]], expected: str, weights: dict[str, float]
) -> None:
    tensors = [numbers(*shape) for shape in shapes]
    assert expected in prove_strategies(op, *tensors, kwargs=weights)


@pytest.mark.parametrize(("op", "shapes", "expected"), SUMS, ids=stable_id)
@pytest.mark.parametrize("weights", [{}, {"beta": 0.5, "alpha": 3}, {"beta": 0}], ids=stable_id)
def test_decomposed_addmm_gives_the_same(
    op: Any, shapes: list[tuple[int, ...]], expected: str, weights: dict[str, float]
) -> None:
    tensors = [numbers(*shape) for shape in shapes]
    apart = find_decomposition(op)(*tensors, **weights)
    torch.testing.assert_close(apart, op(*tensors, **weights))


def test_a_linear_layer_is_decomposed_with_and_without_bias() -> None:
    apart = find_decomposition(aten.linear.default)
    for args in ([numbers(2, 4, 6), numbers(8, 6), numbers(8)], [numbers(4, 6), numbers(8, 6)]):
        torch.testing.assert_close(apart(*args), aten.linear.default(*args))


@pytest.mark.parametrize(
    ("equation", "shapes", "expected"),
    [
        ("bij,bjk->bik", [(2, 4, 6), (2, 6, 8)], {"S(0) S(0) -> S(0)", "S(2) S(1) -> P"}),
        ("b i j , b j k", [(2, 4, 6), (2, 6, 8)], {"S(2) S(1) -> P", "R S(2) -> S(1)"}),
        ("...ij,jk->...ik", [(2, 4, 6), (6, 8)], {"S(0) R -> S(0)", "S(2) S(0) -> P"}),
        ("...i,...i", [(2, 1, 6), (4, 6)], {"R S(0) -> S(1)", "S(0) R -> S(0)", "S(2) S(1) -> P"}),
        ("ij->ji", [(4, 6)], {"S(0) -> S(1)", "S(1) -> S(0)", "P -> P"}),
        ("ij->i", [(4, 6)], {"S(0) -> S(0)", "S(1) -> P"}),
        ("ii->i", [(4, 4)], {"P -> P"}),
        ("iji->j", [(4, 6, 4)], {"S(1) -> S(0)", "P -> P"}),
        ("bhqd,bhkd->bhqk", [(2, 4, 3, 6), (2, 4, 5, 6)], {"S(1) S(1) -> S(1)"}),
        ("i,j,k->ikj", [(2,), (4,), (6,)], {"R R S(0) -> S(1)", "R P R -> P"}),
        ("ij,ij->", [(4, 6), (4, 6)], {"S(0) S(0) -> P", "S(1) S(1) -> P"}),
        ("ba", [(4, 6)], {"S(0) -> S(1)", "S(1) -> S(0)"}),
    ],
)
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_einsum_shards_every_index(
    equation: str, shapes: list[tuple[int, ...]], expected: set[str], num_ranks: int
) -> None:
    tensors = [numbers(*shape) for shape in shapes]
    strategies = prove_strategies(aten.einsum.default, equation, tensors, sizes=[num_ranks])
    assert strategies >= expected


def test_a_diagonal_of_einsum_is_not_sharded() -> None:
    strategies = prove_strategies(aten.einsum.default, "ii->i", [numbers(4, 4)])
    assert not any("S" in strategy for strategy in strategies)


def test_tensordot_names_its_dims() -> None:
    strategies = prove_strategies(
        aten.tensordot.default, numbers(4, 6, 2), numbers(2, 8, 6), [1, -1], [-1, 0]
    )
    assert {"S(0) R -> S(0)", "R S(1) -> S(1)", "S(1) S(2) -> P", "S(2) S(0) -> P"} <= strategies
