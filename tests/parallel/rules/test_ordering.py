"""Ops along one dim or a few: cuts of the others pass; triangles know where a piece begins."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rule_proving import claims, numbers, plain, spelled

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
    ids=spelled,
)
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_sorting_stays_within_its_dim(
    op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], num_ranks: int
) -> None:
    found = claims(op, numbers(4, 3, 5), *args, kwargs=kwargs, sizes=[num_ranks])
    assert {one.split()[0] for one in plain(found)} == {"S(0)", "S(2)"}


def test_the_kth_value_takes_its_dim_away() -> None:
    found = claims(aten.kthvalue.default, numbers(4, 3, 5), 2, -2)
    assert plain(found) == {"S(0) -> S(0) S(0)", "S(2) -> S(1) S(1)"}
    found = claims(aten.kthvalue.default, numbers(4, 3, 5), 2, 1, True)
    assert plain(found) == {"S(0) -> S(0) S(0)", "S(2) -> S(2) S(2)"}


def test_flips_and_rolls_leave_dims_that_they_do_not_name() -> None:
    kept = {"S(1) -> S(1)", "P -> P"}
    assert plain(claims(aten.flip.default, numbers(4, 3, 5), [-1, 0])) == kept
    assert plain(claims(aten.roll.default, numbers(4, 3, 5), [1, 2], [0, -1])) == kept
    assert plain(claims(aten.roll.default, numbers(4, 3), [1])) == {"P -> P"}


def test_padding_with_zeros_keeps_addends_and_dims_that_get_none() -> None:
    for op, args in (
        (aten.constant_pad_nd.default, ([0, 0, 1, -1],)),
        (aten.pad.default, ([0, 0, 1, 2],)),
        (aten.pad.default, ([0, 0, 1, 2], "constant", 0.0)),
    ):
        found = claims(op, numbers(4, 3, 5), *args)
        assert plain(found) == {"S(0) -> S(0)", "S(2) -> S(2)", "P -> P"}


def test_padding_with_a_number_is_not_linear() -> None:
    assert "P -> P" not in claims(aten.constant_pad_nd.default, numbers(4, 3), [1, 1], 2.0)
    assert "P -> P" not in claims(aten.pad.default, numbers(4, 3), [1, 1], "constant", 2.0)


@pytest.mark.parametrize("mode", ["reflect", "replicate", "circular"])
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_padding_with_neighbours_leaves_batch_and_channels(mode: str, num_ranks: int) -> None:
    found = claims(aten.pad.default, numbers(3, 4, 5), [1, 2], mode, sizes=[num_ranks])
    assert {"S(0) -> S(0)", "P -> P"} <= found
    assert ("S(1) -> S(1)" in found) == (num_ranks == 2)  # no rank may go without channels
    assert not any("S(2)" in one for one in found)


@pytest.mark.parametrize(
    "op", [aten.reflection_pad1d.default, aten.replication_pad1d.default], ids=spelled
)
def test_paddings_have_ops_of_their_own(op: Any) -> None:
    assert plain(claims(op, numbers(4, 2, 5), [1, 2])) == {
        *("S(0) -> S(0)", "S(1) -> S(1)", "P -> P"),
    }


@pytest.mark.parametrize("op", [aten.tril.default, aten.triu.default], ids=spelled)
@pytest.mark.parametrize("diagonal", [-2, 0, 1])
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_triangles_are_cut_by_rows_by_columns_and_by_batch(
    op: Any, diagonal: int, num_ranks: int
) -> None:
    found = claims(op, numbers(3, 5, 4), diagonal, sizes=[num_ranks])
    assert plain(found) == {"S(0) -> S(0)", "S(1) -> S(1)", "S(2) -> S(2)", "P -> P"}
    assert not any("S(1, " in one or "S(2, " in one for one in found)


def test_a_triangle_of_truths_on_two_axes() -> None:
    mask = torch.ones(4, 4, dtype=torch.bool)
    found = claims(aten.tril.default, mask, sizes=[2, 2])
    assert {"S(0) -> S(0); S(1) -> S(1)", "S(0) -> S(0); S(0) -> S(0)"} <= found


def test_windows_and_differences_stay_within_their_dim() -> None:
    found = claims(aten.unfold.default, numbers(4, 7, 3), -2, 3, 2)
    assert plain(found) == {"S(0) -> S(0)", "S(2) -> S(2)", "P -> P"}
    assert plain(claims(aten.diff.default, numbers(4, 7), 2, -1)) == {"S(0) -> S(0)", "P -> P"}
    found = claims(aten.diff.default, numbers(4, 7), 1, 1, numbers(4, 1), numbers(4, 2))
    assert plain(found) == {"S(0) S(0) S(0) -> S(0)", "P P P -> P"}
    assert plain(claims(aten.diff.default, numbers(4, 7) > 0, 1, 1)) == {"S(0) -> S(0)"}


def test_buckets_are_found_for_any_piece_of_the_values() -> None:
    edges = numbers(5).sort()[0]
    found = claims(aten.bucketize.Tensor, numbers(4, 3), edges)
    assert plain(found) == {"S(0) R -> S(0)", "S(1) R -> S(1)"}
    assert plain(claims(aten.searchsorted.Tensor, edges, numbers(4, 3))) == {
        *("R S(0) -> S(0)", "R S(1) -> S(1)"),
    }


def test_each_row_of_values_goes_with_its_edges() -> None:
    rows = numbers(4, 5)
    found = claims(aten.searchsorted.Tensor, rows.sort(-1)[0], numbers(4, 3))
    assert plain(found) == {"S(0) S(0) -> S(0)"}
    order = {"sorter": rows.argsort(-1)}
    found = claims(aten.searchsorted.Tensor, rows, numbers(4, 3), kwargs=order)
    assert plain(found) == {"S(0) S(0) S(0) -> S(0)"}


def test_each_element_is_looked_for_among_all() -> None:
    found = claims(aten.isin.Tensor_Tensor, torch.arange(12).view(4, 3), torch.arange(5))
    assert plain(found) == {"S(0) R -> S(0)", "S(1) R -> S(1)"}
