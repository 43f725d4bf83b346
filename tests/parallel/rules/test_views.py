"""Views keep a cut wherever the new dims have one that takes out the same indices."""

from __future__ import annotations

from typing import Any

import pytest
import sympy
import torch

from rule_proving import claims, numbers, spelled
from shardscope.parallel.placements import Placement, Replicate, Shard
from shardscope.parallel.rules.blocks import fold, groups_of
from shardscope.parallel.rules.call import Call, TensorSpec
from shardscope.parallel.rules.lookup import find_rule

aten = torch.ops.aten
VIEWS = [aten.view.default, aten.reshape.default, aten._unsafe_view.default]
KEPT = {"P -> P", "P(max) -> P(max)", "P(min) -> P(min)"}


@pytest.mark.parametrize("op", VIEWS, ids=spelled)
def test_heads_are_split_and_merged_with_their_cut(op: Any) -> None:
    split = claims(op, numbers(2, 3, 8), [2, 3, 4, 2])
    assert {"S(0) -> S(0)", "S(2) -> S(2)", "S(2, 2x) -> S(2, 2x)", *KEPT} <= split
    merged = claims(op, numbers(2, 3, 4, 2), [2, 3, -1])
    assert {"S(0) -> S(0)", "S(2) -> S(2)", "S(3) -> S(2, 4x)", *KEPT} <= merged


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_flattened_batch_of_heads_stays_cut_inside(num_ranks: int) -> None:
    flat = claims(aten.reshape.default, numbers(2, 6, 5), [12, 5], sizes=[num_ranks])
    assert "S(1) -> S(0, 2x)" in flat
    back = claims(aten.view.default, numbers(12, 5), [2, 6, 5], sizes=[num_ranks])
    assert "S(0, 2x) -> S(1)" in back


def test_dims_that_pass_through_may_be_uneven_and_in_blocks() -> None:
    found = claims(aten.view.default, numbers(5, 6, 4), [5, 6, 2, 2])
    assert {"S(0) -> S(0)", "S(1) -> S(1)", "S(1, 3x) -> S(1, 3x)"} <= found
    assert {"S(1, (2, 2, 2)) -> S(1, (2, 2, 2))"} <= found


def test_a_dim_that_is_folded_is_not_cut_unevenly() -> None:
    found = claims(aten.view.default, numbers(6, 4), [2, 3, 4])
    assert "S(0) -> S(0)" in found
    three = claims(aten.view.default, numbers(6, 4), [2, 3, 4], sizes=[3])
    assert not any(one.startswith("S(0) ") for one in three)
    assert "S(0, 2x) -> S(1)" in three


def test_fused_queries_keys_and_values_of_unlike_sizes_become_heads() -> None:
    fused = [(Shard(1, segments=(16, 8, 8)),)]
    found = claims(aten.view.default, numbers(3, 32), [3, 8, 4], offers=fused)
    assert "S(1, (16, 8, 8)) -> S(1, (4, 2, 2))" in found
    heads = [(Shard(1, segments=(4, 2, 2)),)]
    back = claims(aten.reshape.default, numbers(3, 8, 4), [3, 32], offers=heads)
    assert "S(1, (4, 2, 2)) -> S(1, (16, 8, 8))" in back


def test_segments_of_one_size_are_blocks() -> None:
    fused = [(Shard(1, segments=(8, 8, 8)),)]
    found = claims(aten.view.default, numbers(3, 24), [3, 3, 4, 2], offers=fused)
    assert "S(1, (8, 8, 8)) -> S(2)" in found


def test_segments_that_heads_do_not_divide_stay_out() -> None:
    fused = [(Shard(1, segments=(12, 6, 6)),)]
    found = claims(aten.view.default, numbers(3, 24), [3, 6, 4], offers=fused)
    assert not any(one.startswith("S(1, (12, 6, 6))") for one in found)


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
    ids=spelled,
)
@pytest.mark.parametrize("sizes", [[2], [3], [2, 2]], ids=spelled)
def test_all_that_folding_claims_is_true(
    op: Any, shape: tuple[int, ...], args: tuple[Any, ...], sizes: list[int]
) -> None:
    found = claims(op, numbers(*shape), *args, sizes=sizes)
    if len(sizes) == 1:
        assert found >= KEPT
    assert sizes == [3] or 0 in shape or any("S(" in one for one in found)


def test_a_piece_of_size_one_is_not_squeezed_away() -> None:
    assert "S(0) -> S(0)" in claims(aten.squeeze.default, numbers(2, 1, 4))
    assert "S(0) -> S(0)" in claims(aten.squeeze.dim, numbers(2, 1, 4), 0)


def test_a_view_like_another_takes_only_its_shape() -> None:
    for op in (aten.view_as.default, aten.reshape_as.default):
        found = claims(op, numbers(2, 8), numbers(2, 4, 2), offers=[(Shard(1), Shard(2))])
        assert {"S(1) R -> S(1)", "S(1) S(2) -> S(1)"} <= found


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
    ids=spelled,
)
def test_dims_keep_their_cut_wherever_they_go(
    op: Any, args: tuple[Any, ...], expected: dict[int, int]
) -> None:
    found = claims(op, numbers(2, 4, 5), *args)
    plain = {one for one in found if "x)" not in one and "P" not in one}
    assert plain == {f"S({old}) -> S({new})" for old, new in expected.items()}
    assert found >= KEPT


def test_small_transposes_are_known_too() -> None:
    assert "S(0) -> S(1)" in claims(aten.t.default, numbers(4, 6))
    assert "S(0) -> S(0)" in claims(aten.t.default, numbers(4))
    assert "S(0) -> S(1)" in claims(aten.mH.default, numbers(4, 6))


def test_a_diagonal_is_cut_along_the_other_dims() -> None:
    found = claims(aten.diagonal.default, numbers(4, 3, 6, 3), 1, -3, -1)
    assert {"S(0) -> S(0)", "S(2) -> S(1)"} <= found
    assert not any(one.startswith(("S(1", "S(3")) for one in found)


B = sympy.Symbol("s0", integer=True, positive=True)


def ask(before: tuple[Any, ...], after: tuple[Any, ...], offered: Placement) -> list[Any]:
    """What the rule of views says of open sizes."""
    rule = find_rule(aten.view.default)
    assert rule is not None
    tensors = [TensorSpec(shape, torch.float32) for shape in (before, after)]
    call = Call(
        op=aten.view.default,
        arguments={"self": tensors[0], "size": list(after)},
        outputs=(tensors[1],),
        num_ranks=2,
        offered=(offered,),
    )
    return [(one.inputs[0], one.outputs[0]) for one in rule(call)]


def test_an_open_batch_folds_with_its_heads() -> None:
    assert (Shard(1), Shard(0, outer=B)) in ask((B, 4, 8), (B * 4, 8), Replicate())
    assert (Shard(0, B), Shard(1)) in ask((B * 4, 8), (B, 4, 8), Shard(0, B))
    assert (Shard(2), Shard(2)) in ask((B, 3, 8), (B, 3, 4, 2), Replicate())
    assert (Shard(1), Shard(1)) in ask((B, 4, 2), (B, 8), Replicate())


def test_an_open_dim_is_cut_only_where_it_divides() -> None:
    assert (Shard(0), Shard(0)) in ask((2 * B, 4), (B * 2 * 4,), Replicate())
    assert not [old for old, _ in ask((B, 4), (B * 4,), Replicate()) if old == Shard(0)]


def test_groups_hold_the_same_indices() -> None:
    assert list(groups_of((2, 1, 3, 4), (6, 1, 4))) == [([0, 2], [0]), ([3], [2])]
    assert list(groups_of((), (1,))) == []
    assert fold(Shard(0), (6,), (2, 3), group=([0], [0, 1]), num_ranks=2) == Shard(0)
    assert fold(Shard(0), (6,), (2, 3), group=([0], [0, 1]), num_ranks=3) is None


def test_segments_of_another_size_are_not_folded() -> None:
    merged = {"before": (8, 4), "after": (32,), "group": ([0, 1], [0]), "num_ranks": 2}
    assert fold(Shard(0, segments=(4, 2, 2)), **merged) == Shard(0, segments=(16, 8, 8))
    assert fold(Shard(0, segments=(8, 4, 4)), **merged) is None
