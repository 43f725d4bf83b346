"""A step that calls the model inside DistributedDataParallel."""

from __future__ import annotations

import torch
from benchmarks.silent.case import Case, is_buggy
from benchmarks.silent.decoder import Config, Decoder, cross_entropy, make_batch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

CASE = Case(
    source="classic",
    summary="`unwrap(model)`, written to save checkpoints, is also used for the forward call. The "
    "hooks of DDP do not run, and every rank trains a model of its own.",
    mesh={"dp": 2},
    causes=("lost_hook",),
    locations=("all gradients",),
    batch_axes=("dp",),
)
CONFIG = Config(num_layers=1)
BUGGY = is_buggy()


def model() -> nn.Module:
    return Decoder(CONFIG)


def batch(model: nn.Module) -> tuple[Tensor, Tensor]:
    return make_batch(CONFIG)


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def parallelize(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return DistributedDataParallel(model, process_group=mesh.get_group("dp"))


def unwrap(model: nn.Module) -> nn.Module:
    return model.module if isinstance(model, DistributedDataParallel) else model


def train_step(model, batch, optimizer):
    tokens, labels = batch
    optimizer.zero_grad()
    network = unwrap(model) if BUGGY else model
    loss = cross_entropy(network(tokens), labels)  # BUG
    loss.backward()
    optimizer.step()
