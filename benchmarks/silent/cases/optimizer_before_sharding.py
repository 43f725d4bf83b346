"""An optimizer that is built before the model is sharded."""

from __future__ import annotations

import torch
from benchmarks.silent.case import Case, is_buggy
from benchmarks.silent.decoder import Config, Decoder, cross_entropy, make_batch
from benchmarks.silent.tensor_parallel import shard_decoder
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

CASE = Case(
    source="classic",
    summary="Sharding by hand replaces parameters. The optimizer updates those from before; of the "
    "model only embeddings and norms, which are not sharded, learn.",
    mesh={"tp": 2},
    causes=("stale",),
    locations=("layers.*", "the optimizer*"),
)
CONFIG = Config()
BUGGY = is_buggy()


def model() -> nn.Module:
    return Decoder(CONFIG)


def batch(model: nn.Module) -> tuple[Tensor, Tensor]:
    return make_batch(CONFIG, 4)


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def parallelize(model: Decoder, mesh: DeviceMesh):
    before = optimizer(model)  # BUG
    shard_decoder(model, mesh.get_group("tp"))
    return model, before if BUGGY else optimizer(model)


def train_step(model, batch, optimizer):
    tokens, labels = batch
    optimizer.zero_grad()
    loss = cross_entropy(model(tokens), labels)
    loss.backward()
    optimizer.step()
    return loss.item()
