"""What coverage() says where an op cannot be tried to its end: a gap, and no verdict made up."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention.flex_attention import flex_attention

from shardscope import Recording, coverage
from shardscope.errors import CoverageError
from shardscope.record import OpCoverage, OpVerdict
from shardscope.shard.coverage import dispatch


class Calls(nn.Module):
    """A model of one function."""

    def __init__(self, call: Any) -> None:
        super().__init__()
        self.call = call

    def forward(self, *args: Tensor) -> Any:
        return self.call(*args)


def cover(call: Any, *args: Any, **kwargs: Any) -> Recording:
    model = call if isinstance(call, nn.Module) else Calls(call)
    return coverage(model, *args, levels=["exported"], **kwargs)


def ops(recording: Recording) -> dict[str, OpCoverage]:
    return {op.op.removeprefix("aten."): op for op in recording.coverage[0].ops}


def facts(recording: Recording, place: str) -> str:
    return "; ".join(gap.fact for gap in recording.gaps if place in gap.place)


def test_a_single_sharding_that_tries_layouts_without_end_is_stopped_with_a_gap(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dispatch, "MAX_TRIED", 2_000)

    def attend(q: Tensor, mask: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(q, q, q, attn_mask=mask)

    recording = cover(attend, torch.randn(2, 4, 8, 8), torch.randn(8, 8))
    name = "scaled_dot_product_attention.default"
    if torch.__version__ < (2, 13):
        assert ops(recording)[name].verdict is OpVerdict.MISSING  # no rule is looked for yet
        return
    assert (
        ops(recording)[name].verdict is OpVerdict.REPLICATED
    )  # it does run with every input replicated
    assert "14 of its shardings were not tested" in facts(recording, name)


@pytest.mark.parametrize(
    ("op", "call"),
    [
        ("item.default", lambda x: x * x.sum().item()),
        ("equal.default", lambda x: x * int(torch.equal(x, x))),
    ],
)
def test_an_op_that_reads_values_has_dtensors_decision_and_a_gap(op: str, call: Any) -> None:
    recording = cover(call, torch.ones(4, 8))
    fine = (OpVerdict.LOCAL, OpVerdict.SHARDED, OpVerdict.DECOMPOSED)
    assert ops(recording)[op].verdict in fine
    assert "it reads values, and was tested without data" in facts(recording, op)


def test_an_op_for_whose_result_dtensor_itself_finds_no_shape_is_missing() -> None:
    # On real ranks too: it asks tensors without data of its own.
    recording = cover(lambda x: torch.bincount(x), torch.ones(8, dtype=torch.long))
    assert ops(recording)["bincount.default"].verdict is OpVerdict.MISSING


class Graph(nn.Module):
    """Sparse neighbours, as a graph network has them."""

    def __init__(self, neighbours: Tensor) -> None:
        super().__init__()
        self.neighbours = neighbours
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sparse.mm(self.neighbours, self.linear(x))


def test_an_op_on_a_sparse_tensor_is_missing_and_the_others_are_tested() -> None:
    recording = coverage(Graph(torch.eye(8).to_sparse()), torch.ones(8, 4))
    for level in recording.coverage:
        sparse = [op for op in level.ops if "torch.sparse_coo" in op.detail]
        assert sparse
        assert {op.verdict for op in sparse} == {OpVerdict.MISSING}
    assert ops(recording)["linear.default"].verdict is OpVerdict.DECOMPOSED


def choose(x: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,)).exp()


def attend_flexibly(x: Tensor) -> Tensor:
    return flex_attention(x, x, x).exp()


@pytest.mark.filterwarnings("ignore")  # torch's, of flex_attention that is not compiled
@pytest.mark.parametrize(("name", "call"), [("cond", choose), ("flex_attention", attend_flexibly)])
def test_an_op_that_takes_functions_is_a_gap_and_the_others_are_tested(
    name: str, call: Any
) -> None:
    recording = cover(call, torch.randn(1, 2, 8, 16))
    assert "it takes functions" in facts(recording, name)
    assert ops(recording)["exp.default"].verdict is OpVerdict.SHARDED


def test_a_gap_says_in_one_sentence_why_numbers_were_not_compared() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
    fact = facts(cover(model, torch.randn(2, 3, 8, 8)), "convolution_backward")
    assert "ONEDNN" not in fact
    if torch.__version__ >= (2, 13):  # before, it is not let in
        assert "Expected a tensor of dimension 4" in fact
    assert all(len(reason) < 200 for reason in fact.split("; "))


def test_a_backward_that_ends_at_such_an_op_is_a_gap() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Calls(choose))
    recording = cover(model, torch.randn(8, 4))
    assert "backward ended at it" in facts(recording, "cond")
    assert ops(recording)["linear.default"].verdict is OpVerdict.DECOMPOSED


def jagged(*rows: Tensor) -> Tensor:
    return torch.nested.nested_tensor(list(rows), layout=torch.jagged)


@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
def test_nested_tensors_are_refused_in_a_sentence(layout: torch.layout) -> None:
    def nest(x: Tensor) -> Tensor:
        return torch.nested.nested_tensor([x[:2], x[2:]], layout=layout).sin()

    with pytest.raises(
        CoverageError, match="the model uses nested tensors, which are not DTensors"
    ):
        cover(nest, torch.ones(8, 4))
    with pytest.raises(
        CoverageError, match="the model uses nested tensors, which are not DTensors"
    ):
        cover(torch.sin, jagged(torch.ones(2, 4), torch.ones(3, 4)))
