"""An optimizer that was made before the model is sharded."""

from __future__ import annotations

import torch
import torch.distributed as dist
from benchmarks.silent.case import Case, is_buggy
from benchmarks.silent.decoder import Config, Decoder, cross_entropy, make_batch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

CASE = Case(
    source="TrainCheck accelerate-2665",
    summary="The optimizer is made with the model's parameters, which are replaced by shards "
    "when the model is prepared. Gradients are right, the optimizer steps, and the model does "
    "not change: the loss stays where it is.",
    mesh={"dp": 2},
    causes=("stale",),
    locations=("tok_embeddings.weight*", "the optimizer*"),
    batch_axes=("dp",),
)
CONFIG = Config()
BUGGY = is_buggy()


def model() -> nn.Module:
    return Decoder(CONFIG)


def batch(model: nn.Module) -> tuple[Tensor, Tensor]:
    return make_batch(CONFIG)


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def prepare(model: Decoder, mesh: DeviceMesh) -> nn.Module:
    for layer in model.layers.values():
        fully_shard(layer, mesh=mesh["dp"])
    return fully_shard(model, mesh=mesh["dp"])


def parallelize(model: Decoder, mesh: DeviceMesh):
    if BUGGY:
        before = optimizer(model)  # BUG
        return prepare(model, mesh), before
    return prepare(model, mesh)


def train_step(model, batch, optimizer, mesh: DeviceMesh | None = None):
    tokens, labels = batch
    loss = cross_entropy(model(tokens), labels)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    model.zero_grad()
    loss = loss.detach()
    if mesh is not None:
        dist.all_reduce(loss, op=dist.ReduceOp.AVG, group=mesh.get_group("dp"))
    return loss
