"""Tensors made like another need its shape or its type, never its values."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rule_proving import claims, numbers, plain, spelled
from shardscope.parallel.placements import Partial, Shard

aten = torch.ops.aten
OFFERS = [(Partial(),)]


@pytest.mark.parametrize(
    ("op", "args"),
    [
        (aten.zeros_like.default, ()),
        (aten.ones_like.default, ()),
        (aten.full_like.default, (2.5,)),
    ],
    ids=spelled,
)
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_what_looks_like_a_piece_is_a_piece(op: Any, args: tuple[Any, ...], num_ranks: int) -> None:
    found = claims(op, numbers(4, 3), *args, offers=OFFERS, sizes=[num_ranks])
    assert plain(found) == {"S(0) -> S(0)", "S(1) -> S(1)", "P -> R"}


@pytest.mark.parametrize(
    ("op", "args"),
    [
        (aten.new_zeros.default, ([3, 5],)),
        (aten.new_ones.default, ([3, 5],)),
        (aten.new_full.default, ([3, 5], 1.5)),
    ],
    ids=spelled,
)
def test_what_only_has_the_type_of_a_piece_is_whole(op: Any, args: tuple[Any, ...]) -> None:
    offers = [*OFFERS, (Shard(0, outer=2),)]
    found = claims(op, numbers(4, 3), *args, offers=offers)
    assert {"S(0) -> R", "S(1) -> R", "P -> R", "S(0, 2x) -> R"} <= found
    assert not any("-> S" in one for one in found)
