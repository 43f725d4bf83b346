"""Grouped matrix multiplication: groups of rows, each with its own matrix."""

from __future__ import annotations

import pytest
import torch

from rule_proving import prove_strategies, without_blocks
from shardscope.parallel.sharding_rules.grouped_mm import grouped_mm

aten = torch.ops.aten
GROUPED = aten._grouped_mm.default


def test_experts_are_sharded_by_features_out_and_in() -> None:
    rows, experts = torch.randn(6, 16), torch.randn(2, 16, 32)
    strategies = prove_strategies(GROUPED, rows, experts, torch.tensor([2, 6], dtype=torch.int32))
    assert without_blocks(strategies) == {"R S(2) R -> S(1)", "S(1) S(1) R -> P"}


def test_shards_that_kernels_cannot_read_are_not_offered() -> None:
    rows, experts = torch.randn(6, 12), torch.randn(2, 12, 20)
    ends = torch.tensor([2, 6], dtype=torch.int32)
    assert prove_strategies(GROUPED, rows, experts, ends) == set()


OURS = torch.ops.shardscope.grouped_mm.default
ENDS = torch.tensor([2, 2, 6])  # the second group is empty


def test_the_custom_op_is_sharded_for_any_dtype_and_alignment() -> None:
    strategies = prove_strategies(OURS, torch.randn(6, 4), torch.randn(3, 4, 6), ENDS)
    assert without_blocks(strategies) == {"R S(2) R -> S(1)", "S(1) S(1) R -> P"}


def test_the_custom_op_and_its_gradient_equal_torchs() -> None:
    rows = torch.randn(6, 16, requires_grad=True)
    experts = torch.randn(3, 16, 32, requires_grad=True)
    result = grouped_mm(rows, experts, ENDS)
    expected = torch.nn.functional.grouped_mm(rows, experts, offs=ENDS.int())
    torch.testing.assert_close(result, expected)
    gradient = torch.randn_like(result)
    torch.testing.assert_close(
        torch.autograd.grad(result, (rows, experts), gradient),
        torch.autograd.grad(expected, (rows, experts), gradient),
    )


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # by torch 2.15's check
def test_the_custom_op_passes_opcheck() -> None:
    arguments = [torch.randn(shape, dtype=torch.float64) for shape in ((6, 4), (3, 4, 6))]
    trained = [argument.requires_grad_() for argument in arguments]
    torch.library.opcheck(OURS, (*trained, ENDS))
