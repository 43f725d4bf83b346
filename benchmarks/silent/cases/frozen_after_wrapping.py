"""Layers that are chosen for training by name, after wrappers have changed the names."""

from __future__ import annotations

import re

import torch
from benchmarks.silent.case import Case, is_buggy
from benchmarks.silent.decoder import Config, Decoder, cross_entropy, make_batch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

CASE = Case(
    source="classic",
    summary="Finetuning trains the parameters whose names match a pattern. Activation "
    "checkpointing inserts `_checkpoint_wrapped_module` into the names, so that only the head "
    "matches; the loss still decreases.",
    mesh={"dp": 2},
    causes=("stale",),
    locations=("layers.1*",),
    batch_axes=("dp",),
)
CONFIG = Config()
BUGGY = is_buggy()
TRAINED = re.compile(r"layers\.1\.(attention|feed_forward)\.|output\.")


def model() -> nn.Module:
    model = Decoder(CONFIG)
    freeze(model)
    return model


def batch(model: nn.Module) -> tuple[Tensor, Tensor]:
    return make_batch(CONFIG)


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


def freeze(model: nn.Module) -> None:
    """Freeze all parameters but those that are finetuned."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(TRAINED.search(name) is not None)  # BUG


def parallelize(model: Decoder, mesh: DeviceMesh) -> nn.Module:
    for name, layer in list(model.layers.items()):
        model.layers[name] = checkpoint_wrapper(layer)
    if BUGGY:
        freeze(model)
    for layer in model.layers.values():
        fully_shard(layer, mesh=mesh["dp"])
    return fully_shard(model, mesh=mesh["dp"])


def train_step(model, batch, optimizer):
    tokens, labels = batch
    optimizer.zero_grad()
    loss = cross_entropy(model(tokens), labels)
    loss.backward()
    optimizer.step()
