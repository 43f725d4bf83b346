"""broadcast_tensors is sharded along dims that the tensors have."""

from __future__ import annotations

import torch

from rule_proving import numbers, prove_strategies, without_blocks


def test_tensors_that_are_broadcast_stay_replicated() -> None:
    op = torch.ops.aten.broadcast_tensors.default
    strategies = prove_strategies(op, [numbers(4, 1, 5), numbers(3, 5)], sizes=[3])
    assert without_blocks(strategies) == {
        *("S(0) R -> S(0) S(0)", "R S(0) -> S(1) S(1)", "S(2) S(1) -> S(2) S(2)", "P P -> P P"),
    }
