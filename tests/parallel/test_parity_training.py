"""Training steps that are right agree, whatever they are made of; wrong steps are explained."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from shardscope import Recording, parity
from shardscope.record import Severity, Suspect, TensorKind

pytestmark = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")

# Right training steps, of which parts gave false alarms.


def compare_steps(
    model: nn.Module, axes: dict[str, int], parallelize: Any, train_step: Any, **options: Any
) -> Recording:
    """Parity of training with AdamW on vectors, of which each rank along dp has a shard."""
    generator = torch.Generator().manual_seed(3)
    return parity(
        model,
        axes,
        parallelize=parallelize,
        inputs=torch.randn(8, 8, generator=generator),
        train_step=train_step,
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
        batch_axes="dp",
        **options,
    )


def make_layers(dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 4))


def train(model, batch, optimizer):
    optimizer.zero_grad()
    loss = model(batch).square().mean()
    loss.backward()
    optimizer.step()
    return loss


def replicate(model, _):
    return DistributedDataParallel(model)


def test_the_optimizer_state_is_compared_when_a_later_forward_has_exchanged_parameters():
    def train_and_evaluate(model, batch, optimizer):
        loss = train(model, batch, optimizer)
        with torch.no_grad():
            model(batch)  # fully_shard leaves the parameters of the root gathered
        return loss

    recording = compare_steps(
        make_layers(),
        {"dp": 2},
        lambda model, mesh: fully_shard(model, mesh=mesh),
        train_and_evaluate,
    )
    assert recording.findings == ()
    (record,) = recording.parity
    assert sum(tensor.kind is TensorKind.STATE for tensor in record.tensors) == 2 * 3 * 4


def test_each_rank_may_draw_the_dropout_of_its_own_samples():
    recording = compare_steps(make_layers(dropout=0.3), {"dp": 2}, replicate, train)
    (finding,) = recording.findings
    assert (finding.severity, finding.rule) == (Severity.INFO, "parity-random")


def test_a_loss_for_which_ranks_with_the_same_samples_draw_different_numbers_is_found():
    def parallelize(model, mesh):
        torch.manual_seed(mesh["tp"].get_local_rank())
        return DistributedDataParallel(model)

    axes = {"dp": 2, "tp": 2}
    recording = compare_steps(make_layers(dropout=0.3), axes, parallelize, train)
    assert {Suspect.RANDOMNESS} == {tensor.suspect for tensor in recording.parity[0].tensors} - {
        None
    }
    assert recording.findings
