"""A scheduler that is stepped once for each rank."""

from __future__ import annotations

import torch
import torch.distributed as dist
from benchmarks.silent.case import Case, is_buggy
from benchmarks.silent.decoder import Config, Decoder, cross_entropy, make_batch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.optim.lr_scheduler import LambdaLR

CASE = Case(
    source="TrainCheck pytorch-forum-84911 (of its class)",
    summary="The learning rate does not suit the optimizer, so that the model does not learn. In "
    "the original it is set wrong; here the trainer steps the scheduler once for each rank, as "
    "for a batch that is divided, while its steps were already counted per global batch.",
    mesh={"dp": 2},
    causes=("scaled",),
    locations=("the optimizer's settings",),
    batch_axes=("dp",),
)
CONFIG = Config()
NUM_WARMUP = 10
BUGGY = is_buggy()


class Optimization:
    """An optimizer with its scheduler."""

    def __init__(self, model: nn.Module) -> None:
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        self.scheduler = LambdaLR(self.optimizer, lambda step: min(1.0, (step + 1) / NUM_WARMUP))

    def step(self, num_ranks: int) -> None:
        self.optimizer.step()
        for _ in range(num_ranks if BUGGY else 1):
            self.scheduler.step()  # BUG
        self.optimizer.zero_grad()


def model() -> nn.Module:
    return Decoder(CONFIG)


def batch(model: nn.Module) -> tuple[Tensor, Tensor]:
    return make_batch(CONFIG)


def optimizer(model: nn.Module) -> Optimization:
    return Optimization(model)


def parallelize(model: Decoder, mesh: DeviceMesh) -> nn.Module:
    for layer in model.layers.values():
        fully_shard(layer, mesh=mesh["dp"])
    return fully_shard(model, mesh=mesh["dp"])


def train_step(model, batch, optimization, mesh: DeviceMesh | None = None):
    tokens, labels = batch
    loss = cross_entropy(model(tokens), labels)
    loss.backward()
    optimization.step(1 if mesh is None else mesh.size())
    loss = loss.detach()
    if mesh is not None:
        dist.all_reduce(loss, op=dist.ReduceOp.AVG, group=mesh.get_group("dp"))
    return loss
