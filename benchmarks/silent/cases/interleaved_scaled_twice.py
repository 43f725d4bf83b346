"""An interleaved pipeline whose loss is divided by the micro-batches twice."""

from __future__ import annotations

import torch
import torch.distributed as dist
from benchmarks.silent.case import Case, is_buggy
from benchmarks.silent.decoder import Config, Decoder, cross_entropy, make_batch
from benchmarks.silent.stages import Stages, build_stages
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import ScheduleInterleaved1F1B

CASE = Case(
    source="classic",
    summary="The loss function divides by the number of micro-batches, as without a pipeline, and "
    "so does the schedule. The sum of the losses is right; gradients are a quarter.",
    mesh={"pp": 2},
    causes=("scaled",),
    locations=("all gradients", "the loss"),
)
CONFIG = Config(num_layers=4)
NUM_MICRO = 4
BUGGY = is_buggy()


def model() -> nn.Module:
    return Decoder(CONFIG)


def batch(model: nn.Module) -> tuple[Tensor, Tensor]:
    return make_batch(CONFIG)


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def parallelize(model: Decoder, mesh: DeviceMesh) -> nn.Module:
    return build_stages(model, mesh, num_per_rank=2)


def micro_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """The share of a micro-batch in the mean loss of the batch."""
    return cross_entropy(logits, labels) / NUM_MICRO


def make_schedule(stages):
    return ScheduleInterleaved1F1B(stages, NUM_MICRO, micro_loss, scale_grads=BUGGY)  # BUG


def train_step(model, batch, optimizer):
    tokens, labels = batch
    optimizer.zero_grad()
    loss = cross_entropy(model(tokens), labels)
    loss.backward()
    optimizer.step()
    return loss.detach()


def parallel_train_step(model: Stages, batch, optimizer, mesh):
    tokens, labels = batch
    optimizer.zero_grad()
    model.start(mesh, make_schedule)
    loss = torch.zeros(()) + sum(model.step(tokens, labels))
    optimizer.step()
    dist.all_reduce(loss, group=mesh.get_group("pp"))
    return loss
