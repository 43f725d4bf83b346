"""A rule that lies, a rank that does something else, a reduction too many: all are found out."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from parallel_cases.by_hand import check_case, same_sequence
from parallel_cases.case import Case, drawn
from shardscope._torch.collectives.functional import ALL_REDUCE, WAIT
from shardscope.errors import ParallelError
from shardscope.parallel import Colwise, Rowwise, Shard
from shardscope.parallel.ir.graph import Strategy
from shardscope.parallel.passes import collectives as autograd_collectives
from shardscope.parallel.sharding_rules import registry
from shardscope.parallel.sharding_rules.context import LoweringContext, OpCall
from shardscope.parallel.sharding_rules.registry import load_rules

aten = torch.ops.aten


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)
        self.register_buffer("mean", torch.zeros(16))

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(self.first(x))
        self.mean.add_(h.detach().mean(0))
        return self.down(torch.tanh(h).cumsum(-1)).sigmoid()


CASE = Case(
    "model",
    Model,
    lambda: (drawn(4, 8),),
    {"up": Colwise(), "down": Rowwise(), "mean": Shard(0)},
)


@pytest.fixture(autouse=True)
def _loaded() -> None:
    load_rules()


@pytest.fixture(params=[False, True], ids=["inference", "training"])
def training(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def refused(*, training: bool) -> str:
    """What is said of the program when it is verified, as it is by default."""
    with pytest.raises(ParallelError) as caught:
        CASE.parallelize(training=training, verify=True)
    return str(caught.value)


def test_the_unmodified_program_is_correct(training: bool) -> None:
    program = CASE.parallelize(training=training, verify=True)
    assert program.verdicts
    check_case(CASE, program)


def test_a_wrong_rule_is_named_with_its_line(
    monkeypatch: pytest.MonkeyPatch, training: bool
) -> None:
    def lie(call: OpCall) -> Iterator[Strategy]:
        yield Strategy((Shard(1),), (Shard(1),))

    monkeypatch.setitem(registry.RULES, aten.cumsum.default, lie)
    error = refused(training=training)
    assert "the first value that differs is cumsum, aten.cumsum.default" in error
    assert re.search(
        r"test_wrong_programs\.py:\d+: return self\.down\(torch\.tanh\(h\)\.cumsum", error
    )


def test_a_rank_that_computes_something_else_is_found(
    monkeypatch: pytest.MonkeyPatch, training: bool
) -> None:
    def format_placement(local: LoweringContext) -> Any:
        op = aten.tanh.default if local.coordinate.coordinates == (0,) else aten.sigmoid.default
        return local.builder.write(op, local["self"])

    monkeypatch.setitem(registry.LOWERINGS, aten.tanh.default, format_placement)
    error = refused(training=training)
    assert "the first value that differs is tanh, aten.tanh.default" in error


def test_a_rank_that_fails_is_named_with_the_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def format_placement(local: LoweringContext) -> Any:
        short = local.builder.write(aten.slice.Tensor, local["self"], 1, 0, 3)
        return local.builder.write(aten.tanh.default, short)

    monkeypatch.setitem(registry.LOWERINGS, aten.tanh.default, format_placement)
    error = refused(training=False)
    assert "fails on rank 0, though not on a single device (RuntimeError: shape" in error
    assert "test_wrong_programs.py:" in error


def test_a_reduction_that_only_one_rank_issues_is_an_error(
    monkeypatch: pytest.MonkeyPatch, training: bool
) -> None:
    def format_placement(local: LoweringContext) -> Any:
        result = local.builder.write(aten.tanh.default, local["self"])
        if local.coordinate.coordinates == (0,):
            result = local.builder.write(
                WAIT, local.builder.write(ALL_REDUCE, result, "sum", "tp:0-1")
            )
        return result

    monkeypatch.setitem(registry.LOWERINGS, aten.tanh.default, format_placement)
    assert "ranks would deadlock" in refused(training=training)


@pytest.mark.parametrize(
    ("function", "wrong"),
    [
        ("_AllReduceGrad", lambda ctx, gradient: (gradient, None)),
        ("_AllReduce", lambda ctx, gradient: (gradient * 2, None, None)),
        ("_Gather", lambda ctx, gradient: (gradient[:4], None, None, None, None)),
    ],
    ids=["missing", "double", "of another piece"],
)
def test_a_wrong_gradient_of_a_collective_is_found(
    monkeypatch: pytest.MonkeyPatch, function: str, wrong: Any
) -> None:
    monkeypatch.setattr(getattr(autograd_collectives, function), "backward", staticmethod(wrong))
    error = refused(training=True)
    assert "gradient model." in error
    assert "its forward agrees, its gradients do not" in error


def test_a_buffer_that_ranks_write_wrongly_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def format_placement(local: LoweringContext) -> Any:
        mean = local.repeat()
        return local.builder.write(aten.add.Tensor, mean, mean)

    monkeypatch.setitem(registry.LOWERINGS, aten.mean.dim, format_placement)
    error = refused(training=False)
    assert "buffer mean differs" in error
    assert "the first value that differs is mean, aten.mean.dim" in error


# The check by hand, which the other tests rely on, finds such faults too.


def test_the_manual_check_detects_a_wrong_weight(training: bool) -> None:
    program = CASE.parallelize(training=training)
    state = program.exported(1).state_dict
    name = next(name for name in state if name.endswith("up.weight"))
    state[name].data.mul_(1.001)
    with pytest.raises(AssertionError, match="on rank"):
        check_case(CASE, program)


def test_the_manual_check_detects_ranks_with_different_collectives() -> None:
    collective = ("all_reduce", "tp:0-1", (4, 8), torch.float64, "('sum',)")
    for change in ({0: "all_gather"}, {2: (4, 7)}, {3: torch.float32}, {1: "dp:0-1"}):
        changed = tuple(change.get(index, part) for index, part in enumerate(collective))
        with pytest.raises(AssertionError, match="talk"):
            same_sequence({0: [collective], 1: [changed]})
    with pytest.raises(AssertionError, match="talk"):
        same_sequence({0: [collective], 1: []})
