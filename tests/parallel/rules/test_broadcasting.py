"""Tensors brought to one shape are cut where they have the dim."""

from __future__ import annotations

import torch

from rule_proving import claims, numbers, plain


def test_what_is_broadcast_stays_whole() -> None:
    op = torch.ops.aten.broadcast_tensors.default
    found = claims(op, [numbers(4, 1, 5), numbers(3, 5)], sizes=[3])
    assert plain(found) == {
        *("S(0) R -> S(0) S(0)", "R S(0) -> S(1) S(1)", "S(2) S(1) -> S(2) S(2)", "P P -> P P"),
    }
