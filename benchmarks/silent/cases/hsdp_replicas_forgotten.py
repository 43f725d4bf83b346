"""FSDP on the shard axis of a mesh whose replicate axis also has other data."""

from __future__ import annotations

import torch
from benchmarks.silent.case import Case, is_buggy
from benchmarks.silent.decoder import Config, Decoder, cross_entropy, make_batch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

CASE = Case(
    source="classic",
    summary="The model is sharded over the shard axis of the mesh, and the data split over both. "
    "Nothing reduces gradients over the replicas, which become different models.",
    mesh={"dp_replicate": 2, "dp_shard": 2},
    causes=("missing_reduction",),
    locations=("all gradients",),
    batch_axes=("dp_replicate", "dp_shard"),
)
CONFIG = Config(num_layers=1)
BUGGY = is_buggy()


def model() -> nn.Module:
    return Decoder(CONFIG)


def batch(model: nn.Module) -> tuple[Tensor, Tensor]:
    return make_batch(CONFIG)


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def parallelize(model: Decoder, mesh: DeviceMesh) -> nn.Module:
    dp_mesh = mesh["dp_shard"] if BUGGY else mesh["dp_replicate", "dp_shard"]  # BUG
    for layer in model.layers.values():
        fully_shard(layer, mesh=dp_mesh)
    return fully_shard(model, mesh=dp_mesh)


def train_step(model, batch, optimizer):
    tokens, labels = batch
    optimizer.zero_grad()
    loss = cross_entropy(model(tokens), labels)
    loss.backward()
    optimizer.step()
