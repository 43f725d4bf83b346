"""Reductions: dims that stay keep their cut, those that go leave terms, if there are such."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rule_proving import claims, numbers, plain, spelled

aten = torch.ops.aten


@pytest.mark.parametrize("op", [aten.sum.dim_IntList, aten.mean.dim], ids=spelled)
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
    ids=spelled,
)
def test_sums_and_means_of_pieces_are_addends(
    op: Any, num_ranks: int, dims: list[int] | None, keepdim: bool, expected: set[str]
) -> None:
    # Five does not divide: means of uneven pieces weigh as much as they hold.
    found = claims(op, numbers(4, 5, 6), dims, keepdim, sizes=[num_ranks])
    assert plain(found) == {*expected, "P -> P"}


@pytest.mark.parametrize("op", [aten.sum.default, aten.mean.default], ids=spelled)
def test_sums_and_means_of_everything_on_one_axis_and_two(op: Any) -> None:
    assert plain(claims(op, numbers(4, 5))) == {"S(0) -> P", "S(1) -> P", "P -> P"}
    assert "S(0) -> P; S(0) -> P" in claims(op, numbers(4, 6), sizes=[2, 2])
    assert claims(op, numbers()) == {"P -> P"}


def test_a_mean_along_two_axes_of_the_mesh() -> None:
    found = claims(aten.mean.dim, numbers(4, 8, 6), [1], sizes=[2, 2])
    assert {"S(1) -> P; S(1) -> P", "S(1) -> P; S(0) -> S(0)", "S(0) -> S(0); S(1) -> P"} <= found
    assert "P -> P; S(1) -> P" in found


def test_a_sum_counts_truths_but_truths_are_no_addends() -> None:
    found = claims(aten.sum.dim_IntList, numbers(4, 6) > 0, [1])
    assert plain(found) == {"S(0) -> S(0)", "S(1) -> P"}
    cast = claims(aten.sum.dim_IntList, numbers(4, 6), [1], kwargs={"dtype": torch.float32})
    assert "P -> P" not in cast
    assert "S(1) -> P" in cast


@pytest.mark.parametrize("name", ["max", "min"])
def test_extremes_of_pieces_are_terms_for_inference_alone(name: str) -> None:
    along = getattr(aten, f"a{name}").default
    found = claims(along, numbers(4, 6), [-1])
    # The harness proves gradients of what is claimed for training: these are not among them.
    assert {"S(0) -> S(0)", f"S(1) -> P({name})", f"P({name}) -> P({name})"} <= found
    assert f"S(0) -> P({name})" in claims(getattr(aten, name).default, numbers(4))
    assert plain(claims(along, numbers(2, 1), [0], sizes=[3])) == {f"P({name}) -> P({name})"}


def test_both_extremes_at_once() -> None:
    found = claims(aten.aminmax.default, numbers(4, 6), kwargs={"dim": -1, "keepdim": True})
    assert {"S(0) -> S(0) S(0)", "S(1) -> P(min) P(max)"} <= found


@pytest.mark.parametrize("name", ["any", "all"])
def test_truth_anywhere_and_everywhere(name: str) -> None:
    reduction = "max" if name == "any" else "min"
    packet, truths = getattr(aten, name), numbers(4, 6) > 0.5
    expected = {"S(1) -> S(0)", f"S(0) -> P({reduction})", f"P({reduction}) -> P({reduction})"}
    assert claims(packet.dim, truths, -2) >= expected
    assert claims(packet.dims, truths, [0]) >= expected
    assert f"S(0) -> P({reduction})" in claims(packet.default, truths)
    assert f"S(1) -> P({reduction})" in claims(packet.dim, truths.long(), 1)


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


@pytest.mark.parametrize(("op", "args", "first", "last"), WHOLE, ids=spelled)
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_what_has_no_terms_is_cut_along_the_other_dims(
    op: Any, args: tuple[Any, ...], first: str, last: str, num_ranks: int
) -> None:
    found = claims(op, numbers(4, 5, 6), *args, sizes=[num_ranks])
    assert plain(found) == {first, last}


@pytest.mark.parametrize(
    "op",
    [aten.argmax.default, aten.prod.default, aten.std.default, aten.norm.Scalar],
    ids=spelled,
)
def test_what_reduces_everything_and_has_no_terms_is_never_cut(op: Any) -> None:
    assert claims(op, numbers(4, 6)) == set()


@pytest.mark.parametrize("dim", [1, -2])
@pytest.mark.parametrize(
    "op",
    [
        *(aten.cumsum.default, aten.cumprod.default, aten.logcumsumexp.default),
        *(aten.cummax.default, aten.cummin.default),
    ],
    ids=spelled,
)
def test_running_reductions_leave_their_own_dim_whole(op: Any, dim: int) -> None:
    found = claims(op, numbers(4, 5, 6), dim)
    assert any(one.startswith("S(0) ") for one in found)
    assert any(one.startswith("S(2) ") for one in found)
    assert not any(one.startswith("S(1") for one in found)
    assert ("P -> P" in found) == (op is aten.cumsum.default)


def test_counts_of_pieces_are_addends() -> None:
    mask = (numbers(4, 6) > 0).long()
    assert plain(claims(aten.count_nonzero.default, mask)) == {"S(0) -> P", "S(1) -> P"}
    along = claims(aten.count_nonzero.dim_IntList, mask, [-1])
    assert plain(along) == {"S(0) -> S(0)", "S(1) -> P"}
    assert "S(1) -> P" in claims(aten.nansum.default, numbers(4, 6), [1])
