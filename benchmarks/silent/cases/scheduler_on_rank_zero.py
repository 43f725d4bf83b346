"""A learning-rate schedule that only rank 0 advances."""

from __future__ import annotations

import torch
from benchmarks.silent.case import Case, is_buggy
from benchmarks.silent.decoder import Config, Decoder, cross_entropy, make_batch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

CASE = Case(
    source="classic",
    summary="The scheduler steps next to the code that logs the learning rate, on rank 0. Shards "
    "of other ranks are trained with the rate of the warmup's first step.",
    mesh={"dp": 2},
    causes=("out_of_sync", "stale"),
    locations=("the optimizer's settings",),
    batch_axes=("dp",),
    num_steps=3,
)
CONFIG = Config(num_layers=1)
BUGGY = is_buggy()


class Trainer:
    """The optimizer and its schedule."""

    def __init__(self, model: nn.Module) -> None:
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: min(1.0, (step + 1) / 4)
        )


def model() -> nn.Module:
    return Decoder(CONFIG)


def batch(model: nn.Module) -> tuple[Tensor, Tensor]:
    return make_batch(CONFIG)


def optimizer(model: nn.Module) -> Trainer:
    return Trainer(model)


def parallelize(model: Decoder, mesh: DeviceMesh) -> nn.Module:
    return fully_shard(model, mesh=mesh["dp"])


def train_step(model, batch, trainer, mesh=None):
    tokens, labels = batch
    trainer.optimizer.zero_grad()
    cross_entropy(model(tokens), labels).backward()
    trainer.optimizer.step()
    if mesh is None or mesh.get_rank() == 0 or not BUGGY:
        trainer.scheduler.step()  # BUG
