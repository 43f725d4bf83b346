"""A pipeline that accumulates the mean losses of micro-batches without dividing."""

from __future__ import annotations

import torch
from benchmarks.silent.case import Case, is_buggy
from benchmarks.silent.decoder import Config, Decoder, cross_entropy, make_batch
from benchmarks.silent.stages import Stages, build_stages
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import Schedule1F1B

CASE = Case(
    source="classic",
    summary="scale_grads=False is passed to the schedule, as the trainer divides the loss itself "
    "elsewhere; here its loss is the mean of a micro-batch. Gradients are four times too large.",
    mesh={"pp": 2},
    causes=("scaled",),
    locations=("all gradients", "the loss"),
)
CONFIG = Config()
NUM_MICRO = 4
BUGGY = is_buggy()


def model() -> nn.Module:
    return Decoder(CONFIG)


def batch(model: nn.Module) -> tuple[Tensor, Tensor]:
    return make_batch(CONFIG)


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def parallelize(model: Decoder, mesh: DeviceMesh) -> nn.Module:
    return build_stages(model, mesh)


def make_schedule(stage):
    return Schedule1F1B(stage, NUM_MICRO, loss_fn=cross_entropy, scale_grads=not BUGGY)  # BUG


def train_step(model, batch, optimizer):
    tokens, labels = batch
    optimizer.zero_grad()
    cross_entropy(model(tokens), labels).backward()
    optimizer.step()


def parallel_train_step(model: Stages, batch, optimizer, mesh):
    tokens, labels = batch
    optimizer.zero_grad()
    model.start(mesh, make_schedule)
    model.step(tokens, labels)
    optimizer.step()
