"""Products of groups of rows with matrices of their own."""

from __future__ import annotations

import torch

from rule_proving import claims, plain

aten = torch.ops.aten
GROUPED = aten._grouped_mm.default


def test_experts_are_cut_by_features_out_and_in() -> None:
    rows, experts = torch.randn(6, 16), torch.randn(2, 16, 32)
    found = claims(GROUPED, rows, experts, torch.tensor([2, 6], dtype=torch.int32))
    assert plain(found) == {"R S(2) R -> S(1)", "S(1) S(1) R -> P"}


def test_pieces_that_kernels_could_not_read_are_not_cut() -> None:
    rows, experts = torch.randn(6, 12), torch.randn(2, 12, 20)
    ends = torch.tensor([2, 6], dtype=torch.int32)
    assert claims(GROUPED, rows, experts, ends) == set()
