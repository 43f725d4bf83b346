"""Parity of models that shardscope partitions by a plan, in this process and on real ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from parity_models import Gated, squared
from shardscope import parity
from shardscope.errors import ParallelError, ParityError
from shardscope.parallel import Colwise, Rowwise
from shardscope.parallel.ir.graph import Strategy
from shardscope.parallel.sharding_rules.context import OpCall
from shardscope.parallel.sharding_rules.registry import RULES, load_rules
from shardscope.parallel.verify.verify import Trial, run_captured
from shardscope.plan.placements import Shard
from shardscope.record import FINE, TensorKind

PLAN = {"up": Colwise(), "down": Rowwise()}


def verdicts(recording: Any) -> dict[tuple[TensorKind, str], Any]:
    (record,) = recording.parity
    return {(verdict.kind, verdict.name): verdict.agreement for verdict in record.tensors}


def test_outputs_gradients_and_buffers_agree_with_the_default_loss() -> None:
    agreements = verdicts(parity(Gated(), {"tp": 4}, PLAN, inputs=(torch.randn(3, 8),)))
    assert set(agreements.values()) <= FINE
    assert {name for kind, name in agreements if kind is TensorKind.OUTPUT} == {"['y']", "['x']"}
    weights = {"up.weight", "up.bias", "down.weight", "down.bias"}
    assert {name for kind, name in agreements if kind is TensorKind.GRADIENT} == weights
    assert (TensorKind.BUFFER, "calls") in agreements


def test_the_gradients_are_those_of_the_users_loss() -> None:
    recording = parity(Gated(), {"tp": 2}, PLAN, inputs=(torch.randn(3, 8),), loss=squared)
    assert set(verdicts(recording).values()) <= FINE
    assert recording.findings == ()


@pytest.mark.usefixtures("forked_ranks")
def test_real_ranks_agree_too() -> None:
    inputs = (torch.randn(4, 8),)
    mesh = {"dp": 2, "tp": 2}
    recording = parity(Gated(), mesh, PLAN, inputs=inputs, loss=squared, processes=True)
    assert set(verdicts(recording).values()) <= FINE
    assert recording.parity[0].is_in_processes


def test_an_exported_program_is_compared_forward() -> None:
    inputs = (torch.randn(3, 8),)
    program = torch.export.export(Gated(), inputs)
    recording = parity(program, {"tp": 2}, PLAN, inputs=inputs)
    assert {kind for kind, _ in verdicts(recording)} == {TensorKind.OUTPUT, TensorKind.BUFFER}
    assert recording.findings == ()
    with pytest.raises(ParityError, match="cannot be sent to other processes"):
        parity(program, {"tp": 2}, PLAN, inputs=inputs, processes=True)


def test_a_wrong_rule_is_found_and_its_op_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def shard_anyway(call: OpCall) -> list[Strategy]:
        return [Strategy((Shard(1),), (Shard(1),))]

    load_rules()
    monkeypatch.setitem(RULES, torch.ops.aten.softmax.int, shard_anyway)
    recording = parity(Gated(), {"tp": 2}, PLAN, inputs=(torch.randn(3, 8),))
    (finding,) = recording.findings
    assert "aten.softmax.int" in finding.fact
    assert verdicts(recording)[TensorKind.OUTPUT, "['y']"] not in FINE


def test_infinities_from_a_mask_are_not_the_first_difference(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Masked(Gated):
        def forward(self, x: Tensor) -> dict[str, Tensor]:
            mask = (torch.arange(12) < 6).float().log()  # zero, or minus infinity
            return {"y": self.down((self.up(x) + mask).softmax(-1)), "x": x}

    def shard_anyway(call: OpCall) -> list[Strategy]:
        return [Strategy((Shard(1),), (Shard(1),))]

    load_rules()
    assert parity(Masked(), {"tp": 2}, PLAN, inputs=(torch.randn(3, 8),)).findings == ()
    monkeypatch.setitem(RULES, torch.ops.aten.softmax.int, shard_anyway)
    (finding,) = parity(Masked(), {"tp": 2}, PLAN, inputs=(torch.randn(3, 8),)).findings
    assert "The first op to differ is aten.softmax.int." in finding.fact


def test_a_failure_of_the_captured_program_is_not_reported_as_the_models() -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("view size is not compatible with input tensor's size and stride")

    trial = Trial(graph=None, mesh=None, single=fail, ranks={})  # type: ignore[arg-type]
    with pytest.raises(ParallelError) as raised:
        run_captured(trial, [])
    assert str(raised.value) == (
        "torch.export's program of the model fails on these inputs, before it is partitioned "
        "(RuntimeError: view size is not compatible with input tensor's size and stride). Check "
        "that torch.export.export(model, args).module()(*args) works, or pass verify=False."
    )


def test_dropout_draws_what_the_single_device_draws() -> None:
    class Dropped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.down(functional.dropout(self.up(x), 0.5, training=True))

    recording = parity(Dropped(), {"tp": 2}, PLAN, inputs=(torch.randn(3, 8),))
    assert set(verdicts(recording).values()) <= FINE


def test_a_plan_takes_no_step_of_the_users() -> None:
    with pytest.raises(ParityError, match="a program is partitioned together with its loss"):
        parity(Gated(), {"tp": 2}, PLAN, inputs=(torch.randn(3, 8),), step=lambda model, x: None)
    with pytest.raises(ParityError, match="neither a plan nor a function"):
        parity(Gated(), {"tp": 2}, inputs=(torch.randn(3, 8),))
