"""Products of groups of rows with matrices of their own."""

from __future__ import annotations

import pytest
import torch

from rule_proving import claims, plain
from shardscope.parallel.rules.experts import grouped_mm

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


OURS = torch.ops.shardscope.grouped_mm.default
ENDS = torch.tensor([2, 2, 6])  # the second group is empty


def test_experts_of_any_dtype_and_alignment_are_cut_by_our_own_op() -> None:
    found = claims(OURS, torch.randn(6, 4), torch.randn(3, 4, 6), ENDS)
    assert plain(found) == {"R S(2) R -> S(1)", "S(1) S(1) R -> P"}


def test_our_own_op_is_torchs_and_so_is_its_gradient() -> None:
    rows = torch.randn(6, 16, requires_grad=True)
    experts = torch.randn(3, 16, 32, requires_grad=True)
    found = grouped_mm(rows, experts, ENDS)
    expected = torch.nn.functional.grouped_mm(rows, experts, offs=ENDS.int())
    torch.testing.assert_close(found, expected)
    gradient = torch.randn_like(found)
    torch.testing.assert_close(
        torch.autograd.grad(found, (rows, experts), gradient),
        torch.autograd.grad(expected, (rows, experts), gradient),
    )


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # by torch 2.15's check
def test_our_own_op_is_what_torch_expects_of_one() -> None:
    arguments = [torch.randn(shape, dtype=torch.float64) for shape in ((6, 4), (3, 4, 6))]
    trained = [one.requires_grad_() for one in arguments]
    torch.library.opcheck(OURS, (*trained, ENDS))
