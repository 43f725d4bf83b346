"""A loss that each rank divides by its own number of labels."""

from __future__ import annotations

import torch
import torch.distributed as dist
from benchmarks.silent.case import Case, is_buggy
from benchmarks.silent.decoder import IGNORED, Config, Decoder, cross_entropy, make_batch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard

CASE = Case(
    source="torchtitan 0cb743558",
    summary="Each rank takes the mean over its own labels, and FSDP averages the gradients. Ranks "
    "with much padding get the same weight as others; the loss curve looks normal.",
    mesh={"dp": 2},
    causes=("scaled",),
    locations=("the loss",),
    batch_axes=("dp",),
)
CONFIG = Config()
BUGGY = is_buggy()


def model() -> nn.Module:
    return Decoder(CONFIG)


def batch(model: nn.Module) -> tuple[Tensor, Tensor]:
    return make_batch(CONFIG, has_padding=True)


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def parallelize(model: Decoder, mesh: DeviceMesh) -> nn.Module:
    for layer in model.layers.values():
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    for module in model.modules():
        if isinstance(module, FSDPModule) and not BUGGY:
            module.set_gradient_divide_factor(1.0)  # the loss is divided by all labels
    return model


def count_labels(labels: Tensor, mesh: DeviceMesh | None) -> Tensor:
    """The number of labels on all ranks."""
    count = (labels != IGNORED).sum()
    if mesh is not None:
        dist.all_reduce(count, group=mesh.get_group("dp"))
    return count


def forward_backward(model: nn.Module, tokens: Tensor, labels: Tensor, count: Tensor) -> Tensor:
    loss = cross_entropy(model(tokens), labels, reduction="sum") / count
    loss.backward()
    return loss.detach()


def train_step(model, batch, optimizer, mesh=None):
    tokens, labels = batch
    optimizer.zero_grad()
    if BUGGY and mesh is not None:
        loss = cross_entropy(model(tokens), labels)  # BUG
        loss.backward()
        loss = loss.detach() / mesh.size()
    else:
        loss = forward_backward(model, tokens, labels, count_labels(labels, mesh))
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    if mesh is not None:
        dist.all_reduce(loss, group=mesh.get_group("dp"))
    return loss
