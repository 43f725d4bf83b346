"""A trainer that has a wrapped model, and computes the loss with the one inside."""

from __future__ import annotations

import torch
import torch.distributed as dist
from benchmarks.silent.case import Case, is_buggy
from benchmarks.silent.decoder import Config, Decoder, cross_entropy, make_batch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

CASE = Case(
    source="TrainCheck x-jxmnop-ddp-out-of-sync",
    summary="A trainer keeps both its model and the wrapped model. Its own compute_loss uses the "
    "model, so that DistributedDataParallel never sees a batch and reduces no gradient. The loss "
    "fell at first, and rose later, while the gradient norm looked normal.",
    mesh={"dp": 2},
    causes=("lost_hook",),
    locations=("all gradients",),
    batch_axes=("dp",),
)
CONFIG = Config()
BUGGY = is_buggy()


class Trainer:
    """Trains a model, or the model inside a wrapper."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model.module if isinstance(model, DistributedDataParallel) else model
        self.wrapped_model = model

    def compute_loss(self, tokens: Tensor, labels: Tensor) -> Tensor:
        model = self.model if BUGGY else self.wrapped_model
        return cross_entropy(model(tokens), labels)  # BUG

    def training_step(self, batch, optimizer) -> Tensor:
        optimizer.zero_grad()
        loss = self.compute_loss(*batch)
        loss.backward()
        nn.utils.clip_grad_norm_(self.wrapped_model.parameters(), 1.0)
        optimizer.step()
        return loss.detach()


def model() -> nn.Module:
    return Decoder(CONFIG)


def batch(model: nn.Module) -> tuple[Tensor, Tensor]:
    return make_batch(CONFIG)


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def parallelize(model: Decoder, mesh: DeviceMesh) -> nn.Module:
    return DistributedDataParallel(model, process_group=mesh.get_group("dp"))


def train_step(model, batch, optimizer, mesh: DeviceMesh | None = None):
    loss = Trainer(model).training_step(batch, optimizer)
    if mesh is not None:
        dist.all_reduce(loss, op=dist.ReduceOp.AVG, group=mesh.get_group("dp"))
    return loss
