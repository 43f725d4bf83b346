"""Clipping by hand with the norm of the shards of one rank."""

from __future__ import annotations

import torch
import torch.distributed as dist
from benchmarks.silent.case import Case, is_buggy
from benchmarks.silent.decoder import Config, Decoder, cross_entropy, make_batch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

CASE = Case(
    source="classic",
    summary="The norm is computed from local shards, so that each rank clips by another factor, "
    "and by less than it should.",
    mesh={"dp": 2},
    causes=("norm",),
    locations=("the gradient norm",),
    batch_axes=("dp",),
)
CONFIG = Config()
MAX_NORM = 0.1
BUGGY = is_buggy()


def model() -> nn.Module:
    return Decoder(CONFIG)


def batch(model: nn.Module) -> tuple[Tensor, Tensor]:
    return make_batch(CONFIG)


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def parallelize(model: Decoder, mesh: DeviceMesh) -> nn.Module:
    for layer in model.layers.values():
        fully_shard(layer, mesh=mesh["dp"])
    return fully_shard(model, mesh=mesh["dp"])


def clip_gradients(model: nn.Module) -> float:
    """Scale the gradients down to a norm of at most MAX_NORM; their norm before that."""
    gradients = [
        p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad for p in model.parameters()
    ]
    square = torch.stack([gradient.square().sum() for gradient in gradients]).sum()
    if not BUGGY and isinstance(next(model.parameters()), DTensor):
        dist.all_reduce(square)
    norm = square.sqrt().item()  # BUG
    if norm > MAX_NORM:
        for gradient in gradients:
            gradient.mul_(MAX_NORM / norm)
    return norm


def train_step(model, batch, optimizer):
    tokens, labels = batch
    optimizer.zero_grad()
    loss = cross_entropy(model(tokens), labels)
    loss.backward()
    clip_gradients(model)
    optimizer.step()
