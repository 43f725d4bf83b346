"""Parity of shardscope's own transform: by a plan, in this process and on real ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from parity_models import Gated, squared
from shardscope import parity
from shardscope.errors import ParityError
from shardscope.parallel import Colwise, Rowwise
from shardscope.parallel.placements import Shard
from shardscope.parallel.rules.book import RULES
from shardscope.parallel.rules.call import Call, Strategy
from shardscope.parallel.rules.lookup import load_rules
from shardscope.record import FINE, TensorKind

PLAN = {"up": Colwise(), "down": Rowwise()}


def verdicts(recording: Any) -> dict[tuple[TensorKind, str], Any]:
    (found,) = recording.parity
    return {(one.kind, one.name): one.agreement for one in found.tensors}


def test_outputs_gradients_and_buffers_agree_without_a_loss_being_given() -> None:
    found = verdicts(parity(Gated(), {"tp": 4}, PLAN, inputs=(torch.randn(3, 8),)))
    assert set(found.values()) <= FINE
    assert {name for kind, name in found if kind is TensorKind.OUTPUT} == {"['y']", "['x']"}
    weights = {"up.weight", "up.bias", "down.weight", "down.bias"}
    assert {name for kind, name in found if kind is TensorKind.GRADIENT} == weights
    assert (TensorKind.BUFFER, "calls") in found


def test_the_gradients_are_those_of_the_loss_that_is_given() -> None:
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
    def cut_anyway(call: Call) -> list[Strategy]:
        return [Strategy((Shard(1),), (Shard(1),))]

    load_rules()
    monkeypatch.setitem(RULES, torch.ops.aten.softmax.int, cut_anyway)
    recording = parity(Gated(), {"tp": 2}, PLAN, inputs=(torch.randn(3, 8),))
    (finding,) = recording.findings
    assert "aten.softmax.int" in finding.fact
    assert verdicts(recording)[TensorKind.OUTPUT, "['y']"] not in FINE


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
    with pytest.raises(ParityError, match="a plan is applied to a model and its loss"):
        parity(Gated(), {"tp": 2}, PLAN, inputs=(torch.randn(3, 8),), step=lambda model, x: None)
    with pytest.raises(ParityError, match="neither a plan nor a function"):
        parity(Gated(), {"tp": 2}, inputs=(torch.randn(3, 8),))
