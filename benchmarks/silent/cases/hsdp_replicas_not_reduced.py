"""Data parallelism by properties on a mesh of replicas and shards, with placements for one."""

from __future__ import annotations

import torch
import torch.distributed as dist
from benchmarks.silent.case import Case, is_buggy
from benchmarks.silent.decoder import Config, Decoder, cross_entropy, make_batch
from benchmarks.silent.simple_fsdp import shard_parameters
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard

CASE = Case(
    source="torchtitan 71517cf68",
    summary="The placements of a mesh with replicas and shards are made from that of the shards "
    "only. Here gradients are reduced over the shards and not over the replicas, which drift "
    "apart; each of them trains well.",
    mesh={"replicate": 2, "shard": 2},
    causes=("missing_reduction",),
    locations=("all gradients",),
    batch_axes=("replicate", "shard"),
)
CONFIG = Config()
BUGGY = is_buggy()


def model() -> nn.Module:
    return Decoder(CONFIG)


def batch(model: nn.Module) -> tuple[Tensor, Tensor]:
    return make_batch(CONFIG)


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def data_parallel(model: nn.Module, mesh: DeviceMesh, mode: str) -> nn.Module:
    """Shard all parameters over the last axis of the mesh, or keep replicas of them."""
    is_sharded = mode in ("fully_shard", "hybrid_shard")
    placements = [Replicate()] * mesh.ndim
    gradients = [Partial("avg")] * mesh.ndim
    if is_sharded:
        placements[-1] = Shard(0)
    if BUGGY:
        gradients = [Replicate()] * (mesh.ndim - 1) + [Partial("avg")]  # BUG
    for module in model.modules():
        shard_parameters(module, mesh, placements, gradients)
    return model


def parallelize(model: Decoder, mesh: DeviceMesh) -> nn.Module:
    return data_parallel(model, mesh["replicate", "shard"], "hybrid_shard")


def train_step(model, batch, optimizer, mesh=None):
    tokens, labels = batch
    optimizer.zero_grad()
    loss = cross_entropy(model(tokens), labels)
    loss.backward()
    optimizer.step()
    loss = loss.detach()
    if mesh is not None:
        dist.all_reduce(loss)
        loss /= mesh.size()
    return loss
