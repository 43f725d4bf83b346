"""Reductions are sharded along remaining dims; along reduced dims the result is partial, if it can
be.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rule_proving import numbers, prove_strategies, stable_id, without_blocks

aten = torch.ops.aten


@pytest.mark.parametrize("op", [aten.sum.dim_IntList, aten.mean.dim], ids=stable_id)
@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize(
    ("dims", "keepdim", "expected"),
    [
        ([1], False, {"S(0) -> S(0)", "S(1) -> P", "S(2) -> S(1)"}),
        ([-1], True, {"S(0) -> S(0)", "S(1) -> S(1)", "S(2) -> P"}),
        ([0, -1], False, {"S(0) -> P", "S(1) -> S(0)", "S(2) -> P"}),
        ([], False, {"S(0) -> P", "S(1) -> P", "S(2) -> P"}),
        (None, True, {"S(0) -> P", "S(1) -> P", "S(2) -> P"}),
    ],
    ids=stable_id,
)
def test_sums_and_means_along_sharded_dims_are_partial(
    op: Any, num_ranks: int, dims: list[int] | None, keepdim: bool, expected: set[str]
) -> None:
    # Five does not divide: means of uneven shards are weighted by their sizes.
    strategies = prove_strategies(op, numbers(4, 5, 6), dims, keepdim, sizes=[num_ranks])
    assert without_blocks(strategies) == {*expected, "P -> P"}


@pytest.mark.parametrize("op", [aten.sum.default, aten.mean.default], ids=stable_id)
def test_sums_and_means_of_everything_on_one_axis_and_two(op: Any) -> None:
    assert without_blocks(prove_strategies(op, numbers(4, 5))) == {
        "S(0) -> P",
        "S(1) -> P",
        "P -> P",
    }
    assert "S(0) -> P; S(0) -> P" in prove_strategies(op, numbers(4, 6), sizes=[2, 2])
    assert prove_strategies(op, numbers()) == {"P -> P"}


def test_a_mean_along_two_axes_of_the_mesh() -> None:
    strategies = prove_strategies(aten.mean.dim, numbers(4, 8, 6), [1], sizes=[2, 2])
    assert {
        "S(1) -> P; S(1) -> P",
        "S(1) -> P; S(0) -> S(0)",
        "S(0) -> S(0); S(1) -> P",
    } <= strategies
    assert "P -> P; S(1) -> P" in strategies


def test_bools_can_be_summed_but_are_not_partial_sums() -> None:
    strategies = prove_strategies(aten.sum.dim_IntList, numbers(4, 6) > 0, [1])
    assert without_blocks(strategies) == {"S(0) -> S(0)", "S(1) -> P"}
    cast = prove_strategies(
        aten.sum.dim_IntList, numbers(4, 6), [1], kwargs={"dtype": torch.float32}
    )
    assert "P -> P" not in cast
    assert "S(1) -> P" in cast


@pytest.mark.parametrize("name", ["max", "min"])
def test_maxima_along_sharded_dims_are_partial_in_inference_only(name: str) -> None:
    along = getattr(aten, f"a{name}").default
    strategies = prove_strategies(along, numbers(4, 6), [-1])
    # The harness proves gradients of what is claimed for training: these are not among them.
    assert {"S(0) -> S(0)", f"S(1) -> P({name})", f"P({name}) -> P({name})"} <= strategies
    assert f"S(0) -> P({name})" in prove_strategies(getattr(aten, name).default, numbers(4))
    assert without_blocks(prove_strategies(along, numbers(2, 1), [0], sizes=[3])) == {
        f"P({name}) -> P({name})"
    }


def test_aminmax() -> None:
    strategies = prove_strategies(
        aten.aminmax.default, numbers(4, 6), kwargs={"dim": -1, "keepdim": True}
    )
    assert {"S(0) -> S(0) S(0)", "S(1) -> P(min) P(max)"} <= strategies


@pytest.mark.parametrize("name", ["any", "all"])
def test_any_and_all(name: str) -> None:
    reduction = "max" if name == "any" else "min"
    packet, truths = getattr(aten, name), numbers(4, 6) > 0.5
    expected = {"S(1) -> S(0)", f"S(0) -> P({reduction})", f"P({reduction}) -> P({reduction})"}
    assert prove_strategies(packet.dim, truths, -2) >= expected
    assert prove_strategies(packet.dims, truths, [0]) >= expected
    assert f"S(0) -> P({reduction})" in prove_strategies(packet.default, truths)
    assert f"S(1) -> P({reduction})" in prove_strategies(packet.dim, truths.long(), 1)


WHOLE = [
    (aten.max.dim, (1,), "S(0) -> S(0) S(0)", "S(2) -> S(1) S(1)"),
    (aten.min.dim, (-2, True), "S(0) -> S(0) S(0)", "S(2) -> S(2) S(2)"),
    (aten.argmax.default, (1,), "S(0) -> S(0)", "S(2) -> S(1)"),
    (aten.argmin.default, (-2, True), "S(0) -> S(0)", "S(2) -> S(2)"),
    (aten.prod.dim_int, (-2,), "S(0) -> S(0)", "S(2) -> S(1)"),
    (aten.var.dim, ([1],), "S(0) -> S(0)", "S(2) -> S(1)"),
    (aten.var.correction, ([-2],), "S(0) -> S(0)", "S(2) -> S(1)"),
    (aten.std.correction, ([-2],), "S(0) -> S(0)", "S(2) -> S(1)"),
    (aten.var_mean.correction, ([1],), "S(0) -> S(0) S(0)", "S(2) -> S(1) S(1)"),
    (aten.std_mean.dim, ([1], True, True), "S(0) -> S(0) S(0)", "S(2) -> S(2) S(2)"),
    (aten.logsumexp.default, ([-2],), "S(0) -> S(0)", "S(2) -> S(1)"),
    (aten.linalg_vector_norm.default, (2, [1]), "S(0) -> S(0)", "S(2) -> S(1)"),
    (aten.norm.ScalarOpt_dim, (3, [-2], True), "S(0) -> S(0)", "S(2) -> S(2)"),
    (aten.frobenius_norm.dim, ([1],), "S(0) -> S(0)", "S(2) -> S(1)"),
]


@pytest.mark.parametrize(("op", "args", "first", "last"), WHOLE, ids=stable_id)
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_reductions_without_partials_are_sharded_along_the_other_dims(
    op: Any, args: tuple[Any, ...], first: str, last: str, num_ranks: int
) -> None:
    strategies = prove_strategies(op, numbers(4, 5, 6), *args, sizes=[num_ranks])
    assert without_blocks(strategies) == {first, last}


@pytest.mark.parametrize(
    "op",
    [aten.argmax.default, aten.prod.default, aten.std.default, aten.norm.Scalar],
    ids=stable_id,
)
def test_full_reductions_without_partials_are_never_sharded(op: Any) -> None:
    assert prove_strategies(op, numbers(4, 6)) == set()


@pytest.mark.parametrize("dim", [1, -2])
@pytest.mark.parametrize(
    "op",
    [
        *(aten.cumsum.default, aten.cumprod.default, aten.logcumsumexp.default),
        *(aten.cummax.default, aten.cummin.default),
    ],
    ids=stable_id,
)
def test_cumulative_ops_do_not_shard_their_dim(op: Any, dim: int) -> None:
    strategies = prove_strategies(op, numbers(4, 5, 6), dim)
    assert any(strategy.startswith("S(0) ") for strategy in strategies)
    assert any(strategy.startswith("S(2) ") for strategy in strategies)
    assert not any(strategy.startswith("S(1") for strategy in strategies)
    assert ("P -> P" in strategies) == (op is aten.cumsum.default)


def test_counts_along_sharded_dims_are_partial() -> None:
    mask = (numbers(4, 6) > 0).long()
    assert without_blocks(prove_strategies(aten.count_nonzero.default, mask)) == {
        "S(0) -> P",
        "S(1) -> P",
    }
    along = prove_strategies(aten.count_nonzero.dim_IntList, mask, [-1])
    assert without_blocks(along) == {"S(0) -> S(0)", "S(1) -> P"}
    assert "S(1) -> P" in prove_strategies(aten.nansum.default, numbers(4, 6), [1])
