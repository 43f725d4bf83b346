"""Gradient accumulation under FSDP that sums the means of micro-batches."""

from __future__ import annotations

import torch
from benchmarks.silent.case import Case, is_buggy
from benchmarks.silent.decoder import Config, Decoder, cross_entropy, make_batch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

CASE = Case(
    source="classic",
    summary="The ranks accumulate four micro-batches, each with the mean of its own loss, and "
    "nothing divides by four. AdamW hides the factor; clipping does not.",
    mesh={"dp": 2},
    causes=("scaled",),
    locations=("all gradients", "the loss"),
    batch_axes=("dp",),
)
CONFIG = Config()
NUM_MICRO = 4
BUGGY = is_buggy()


def model() -> nn.Module:
    return Decoder(CONFIG)


def batch(model: nn.Module) -> tuple[Tensor, Tensor]:
    return make_batch(CONFIG)


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def parallelize(model: Decoder, mesh: DeviceMesh) -> nn.Module:
    for layer in model.layers.values():
        fully_shard(layer, mesh=mesh["dp"])
    return fully_shard(model, mesh=mesh["dp"])


def train_step(model, batch, optimizer):
    tokens, labels = batch
    optimizer.zero_grad()
    loss = cross_entropy(model(tokens), labels)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def parallel_train_step(model, batch, optimizer):
    tokens, labels = batch
    optimizer.zero_grad()
    for inputs, targets in zip(tokens.chunk(NUM_MICRO), labels.chunk(NUM_MICRO), strict=True):
        loss = cross_entropy(model(inputs), targets)
        if not BUGGY:
            loss = loss / NUM_MICRO
        loss.backward()  # BUG
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
