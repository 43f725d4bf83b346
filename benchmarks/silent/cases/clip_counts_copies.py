"""Clipping under tensor parallelism that counts replicated parameters once per rank."""

from __future__ import annotations

import torch
import torch.distributed as dist
from benchmarks.silent.case import Case, is_buggy
from benchmarks.silent.decoder import Config, Decoder, cross_entropy, make_batch
from benchmarks.silent.tensor_parallel import is_sharded, shard_decoder
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

CASE = Case(
    source="classic",
    summary="The squared norms of all parameters are summed over tp. Embeddings and norms are on "
    "every rank and are counted twice; gradients are clipped too much.",
    mesh={"tp": 2},
    causes=("norm",),
    locations=("the gradient norm",),
)
CONFIG = Config()
MAX_NORM = 0.5
BUGGY = is_buggy()


def model() -> nn.Module:
    return Decoder(CONFIG)


def batch(model: nn.Module) -> tuple[Tensor, Tensor]:
    return make_batch(CONFIG, 4)


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def parallelize(model: Decoder, mesh: DeviceMesh) -> nn.Module:
    shard_decoder(model, mesh.get_group("tp"))
    return model


def total_norm(model: nn.Module, mesh: DeviceMesh | None) -> Tensor:
    """The norm of all gradients of the model."""
    square = torch.zeros(())
    for name, parameter in model.named_parameters():
        is_copy = mesh is not None and not is_sharded(name) and not BUGGY
        if not is_copy or mesh.get_local_rank("tp") == 0:
            square += parameter.grad.square().sum()  # BUG
    if mesh is not None:
        dist.all_reduce(square, group=mesh.get_group("tp"))
    return square.sqrt()


def train_step(model, batch, optimizer, mesh=None):
    tokens, labels = batch
    optimizer.zero_grad()
    loss = cross_entropy(model(tokens), labels)
    loss.backward()
    norm = total_norm(model, mesh)
    nn.utils.clip_grads_with_norm_(model.parameters(), MAX_NORM, norm)
    optimizer.step()
    return loss.detach()
