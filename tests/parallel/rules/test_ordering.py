"""Ops along one dim or a few are sharded along the others; tril and triu depend on where a shard
begins.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rule_proving import numbers, prove_strategies, stable_id, without_blocks

aten = torch.ops.aten


@pytest.mark.parametrize(
    ("op", "args", "kwargs"),
    [
        (aten.topk.default, (2, -2), {}),
        (aten.sort.default, (1,), {}),
        (aten.sort.stable, (), {"stable": True, "dim": -2, "descending": True}),
        (aten.argsort.default, (-2,), {}),
        (aten.argsort.stable, (), {"stable": True, "dim": 1}),
    ],
    ids=stable_id,
)
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_sort_does_not_shard_its_dim(
    op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], num_ranks: int
) -> None:
    strategies = prove_strategies(op, numbers(4, 3, 5), *args, kwargs=kwargs, sizes=[num_ranks])
    assert {strategy.split()[0] for strategy in without_blocks(strategies)} == {"S(0)", "S(2)"}


def test_kthvalue_removes_its_dim() -> None:
    strategies = prove_strategies(aten.kthvalue.default, numbers(4, 3, 5), 2, -2)
    assert without_blocks(strategies) == {"S(0) -> S(0) S(0)", "S(2) -> S(1) S(1)"}
    strategies = prove_strategies(aten.kthvalue.default, numbers(4, 3, 5), 2, 1, True)
    assert without_blocks(strategies) == {"S(0) -> S(0) S(0)", "S(2) -> S(2) S(2)"}


def test_flips_and_rolls_leave_dims_that_they_do_not_name() -> None:
    expected = {"S(1) -> S(1)", "P -> P"}
    assert (
        without_blocks(prove_strategies(aten.flip.default, numbers(4, 3, 5), [-1, 0])) == expected
    )
    assert (
        without_blocks(prove_strategies(aten.roll.default, numbers(4, 3, 5), [1, 2], [0, -1]))
        == expected
    )
    assert without_blocks(prove_strategies(aten.roll.default, numbers(4, 3), [1])) == {"P -> P"}


def test_zero_padding_allows_partial_sums_and_unpadded_dims() -> None:
    for op, args in (
        (aten.constant_pad_nd.default, ([0, 0, 1, -1],)),
        (aten.pad.default, ([0, 0, 1, 2],)),
        (aten.pad.default, ([0, 0, 1, 2], "constant", 0.0)),
    ):
        strategies = prove_strategies(op, numbers(4, 3, 5), *args)
        assert without_blocks(strategies) == {"S(0) -> S(0)", "S(2) -> S(2)", "P -> P"}


def test_padding_with_a_number_is_not_linear() -> None:
    assert "P -> P" not in prove_strategies(
        aten.constant_pad_nd.default, numbers(4, 3), [1, 1], 2.0
    )
    assert "P -> P" not in prove_strategies(
        aten.pad.default, numbers(4, 3), [1, 1], "constant", 2.0
    )


@pytest.mark.parametrize("mode", ["reflect", "replicate", "circular"])
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_reflection_padding_shards_batch_and_channels(mode: str, num_ranks: int) -> None:
    strategies = prove_strategies(
        aten.pad.default, numbers(3, 4, 5), [1, 2], mode, sizes=[num_ranks]
    )
    assert {"S(0) -> S(0)", "P -> P"} <= strategies
    assert ("S(1) -> S(1)" in strategies) == (num_ranks == 2)  # no rank may go without channels
    assert not any("S(2)" in strategy for strategy in strategies)


@pytest.mark.parametrize(
    "op", [aten.reflection_pad1d.default, aten.replication_pad1d.default], ids=stable_id
)
def test_aten_padding_ops_are_sharded_too(op: Any) -> None:
    assert without_blocks(prove_strategies(op, numbers(4, 2, 5), [1, 2])) == {
        *("S(0) -> S(0)", "S(1) -> S(1)", "P -> P"),
    }


@pytest.mark.parametrize("op", [aten.tril.default, aten.triu.default], ids=stable_id)
@pytest.mark.parametrize("diagonal", [-2, 0, 1])
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_tril_and_triu_are_sharded_by_rows_columns_and_batch(
    op: Any, diagonal: int, num_ranks: int
) -> None:
    strategies = prove_strategies(op, numbers(3, 5, 4), diagonal, sizes=[num_ranks])
    assert without_blocks(strategies) == {"S(0) -> S(0)", "S(1) -> S(1)", "S(2) -> S(2)", "P -> P"}
    assert not any("S(1, " in strategy or "S(2, " in strategy for strategy in strategies)


def test_tril_of_bools_on_two_axes() -> None:
    mask = torch.ones(4, 4, dtype=torch.bool)
    strategies = prove_strategies(aten.tril.default, mask, sizes=[2, 2])
    assert {"S(0) -> S(0); S(1) -> S(1)", "S(0) -> S(0); S(0) -> S(0)"} <= strategies


def test_windows_and_differences_stay_within_their_dim() -> None:
    strategies = prove_strategies(aten.unfold.default, numbers(4, 7, 3), -2, 3, 2)
    assert without_blocks(strategies) == {"S(0) -> S(0)", "S(2) -> S(2)", "P -> P"}
    assert without_blocks(prove_strategies(aten.diff.default, numbers(4, 7), 2, -1)) == {
        "S(0) -> S(0)",
        "P -> P",
    }
    strategies = prove_strategies(
        aten.diff.default, numbers(4, 7), 1, 1, numbers(4, 1), numbers(4, 2)
    )
    assert without_blocks(strategies) == {"S(0) S(0) S(0) -> S(0)", "P P P -> P"}
    assert without_blocks(prove_strategies(aten.diff.default, numbers(4, 7) > 0, 1, 1)) == {
        "S(0) -> S(0)"
    }


def test_bucketize_shards_the_values() -> None:
    edges = numbers(5).sort()[0]
    strategies = prove_strategies(aten.bucketize.Tensor, numbers(4, 3), edges)
    assert without_blocks(strategies) == {"S(0) R -> S(0)", "S(1) R -> S(1)"}
    assert without_blocks(prove_strategies(aten.searchsorted.Tensor, edges, numbers(4, 3))) == {
        *("R S(0) -> S(0)", "R S(1) -> S(1)"),
    }


def test_searchsorted_shards_rows_with_their_boundaries() -> None:
    rows = numbers(4, 5)
    strategies = prove_strategies(aten.searchsorted.Tensor, rows.sort(-1)[0], numbers(4, 3))
    assert without_blocks(strategies) == {"S(0) S(0) -> S(0)"}
    order = {"sorter": rows.argsort(-1)}
    strategies = prove_strategies(aten.searchsorted.Tensor, rows, numbers(4, 3), kwargs=order)
    assert without_blocks(strategies) == {"S(0) S(0) S(0) -> S(0)"}


def test_isin_shards_the_elements() -> None:
    strategies = prove_strategies(
        aten.isin.Tensor_Tensor, torch.arange(12).view(4, 3), torch.arange(5)
    )
    assert without_blocks(strategies) == {"S(0) R -> S(0)", "S(1) R -> S(1)"}
