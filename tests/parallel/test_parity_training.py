"""Training steps that are right agree, whatever they are made of; wrong steps are explained."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)
from torch.nn.parallel import DistributedDataParallel

from parity_models import Sum
from shardscope import Recording, parity
from shardscope.record import Severity, Suspect, TensorKind

pytestmark = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")

# Right training steps, of which parts gave false alarms.


def compare_steps(
    model: nn.Module, axes: dict[str, int], parallelize: Any, train_step: Any, **options: Any
) -> Recording:
    """Parity of training with AdamW on vectors, of which each rank along dp has a shard."""
    options = {"batch_axes": "dp", **options}
    generator = torch.Generator().manual_seed(3)
    return parity(
        model,
        axes,
        parallelize=parallelize,
        inputs=torch.randn(8, 8, generator=generator),
        train_step=train_step,
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
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


class Stage(nn.Module):
    """A layer of a pipeline."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        return self.layer(x).tanh()


class Pipeline(nn.Module):
    def __init__(self, num_stages: int) -> None:
        super().__init__()
        self.stages = nn.ModuleDict({str(index): Stage() for index in range(num_stages)})

    def forward(self, x):
        for stage in self.stages.values():
            x = stage(x)
        return x


def train_in_micro_batches(model, batch, optimizer):
    optimizer.zero_grad()
    losses = [model(micro).square().mean() / 4 for micro in batch.chunk(4)]
    sum(losses).backward()
    optimizer.step()
    return sum(losses).detach()


def compare_schedule(make_schedule: Any, num_stages: int, divisor: int = 1) -> Recording:
    """Parity of a pipeline on two ranks, whose stages the model's container does not call.

    The loss of each micro-batch is divided by `divisor`, and the sum of losses multiplied by it.
    """

    def parallelize(model, mesh):
        mine = [i for i in range(num_stages) if i % 2 == mesh.get_local_rank()]
        return nn.ModuleDict({str(index): model.stages[str(index)] for index in mine})

    def step(model, batch, optimizer, mesh):
        optimizer.zero_grad()
        stages = [
            PipelineStage(part, int(index), num_stages, torch.device("cpu"))
            for index, part in model.items()
        ]
        schedule = make_schedule(
            stages if num_stages > 2 else stages[0],
            4,
            loss_fn=lambda y, _: y.square().mean() / divisor,
        )
        losses = []
        is_first = mesh.get_local_rank() == 0
        schedule.step(batch) if is_first else schedule.step(target=batch, losses=losses)
        optimizer.step()
        total = torch.stack(losses).mean() if losses else torch.zeros(())
        dist.all_reduce(total)
        return total * divisor

    torch.manual_seed(1)
    return parity(
        Pipeline(num_stages),
        {"pp": 2},
        parallelize=parallelize,
        inputs=torch.randn(8, 8),
        train_step=train_in_micro_batches,
        parallel_train_step=step,
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
    )


@pytest.mark.parametrize(
    ("schedule", "num_stages"),
    [(Schedule1F1B, 2), (ScheduleInterleaved1F1B, 4), (ScheduleInterleavedZeroBubble, 4)],
)
def test_a_pipeline_may_call_its_stages_and_not_the_model(schedule, num_stages):
    recording = compare_schedule(schedule, num_stages)
    assert recording.findings == ()
    kinds = [tensor.kind for tensor in recording.parity[0].tensors]
    assert kinds.count(TensorKind.STATE) == 2 * 3 * 2 * num_stages
    assert TensorKind.OUTPUT not in kinds


def test_a_common_factor_shows_better_after_a_pipelines_backward_than_in_the_middle_of_it():
    recording = compare_schedule(ScheduleInterleaved1F1B, 4, divisor=4)
    (finding,) = recording.findings
    assert finding.subject == "all gradients"
    assert "Every gradient is 0.25 times what it should be." in finding.fact


class Row(nn.Module):
    """A linear layer with this rank's part of the input."""

    def __init__(self, linear: nn.Linear, rank: int, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(linear.weight.detach().chunk(size, 1)[rank].clone())
        self.bias = linear.bias

    def forward(self, x):
        part = x.chunk(dist.get_world_size(), -1)[dist.get_rank()]
        return Sum.apply(part @ self.weight.T, None) + self.bias


def test_the_number_of_steps_is_compared_where_a_rank_has_a_part_of_the_weight():
    def parallelize(model, mesh):
        model[0] = Row(model[0], mesh.get_local_rank(), mesh.size())

    def step(model, batch, optimizer):
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    recording = compare_steps(make_layers(), {"tp": 2}, parallelize, step, batch_axes=())
    assert recording.findings == ()
    names = {tensor.name for tensor in recording.parity[0].tensors}
    assert {"0.weight step", "0.weight exp_avg", "3.bias step"} <= names


def test_gradients_that_fully_shard_divides_by_a_factor_of_their_own_agree():
    def parallelize(model, mesh):
        fully_shard(model, mesh=mesh)
        model.set_gradient_divide_factor(4.0)

    def step(model, batch, optimizer, mesh):
        optimizer.zero_grad()
        loss = model(batch).square().mean() * 2  # a sum of means on two ranks, divided by 4
        loss.backward()
        optimizer.step()
        return loss / 2

    recording = compare_steps(
        make_layers(), {"dp": 2}, parallelize, train, parallel_train_step=step
    )
    assert recording.findings == ()
