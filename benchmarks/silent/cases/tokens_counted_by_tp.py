"""Tokens are counted over all ranks, though tensor-parallel ranks have the same ones."""

from __future__ import annotations

import torch
import torch.distributed as dist
from benchmarks.silent.case import Case, is_buggy
from benchmarks.silent.decoder import IGNORED, Config, Decoder, cross_entropy, make_batch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

CASE = Case(
    source="torchtune issue 2641",
    summary="Gradients of the summed loss are scaled by the number of data-parallel ranks over "
    "the number of tokens. Tokens are counted over all ranks, and those of tensor-parallel ranks "
    "are the same: gradients and their norm are too small by the size of that axis.",
    mesh={"dp": 2, "tp": 2},
    causes=("scaled", "double_reduction"),
    locations=("all gradients",),
    batch_axes=("dp",),
)
CONFIG = Config()
BUGGY = is_buggy()
STYLES = {
    "attention.wq": ColwiseParallel,
    "attention.wk": ColwiseParallel,
    "attention.wv": ColwiseParallel,
    "attention.wo": RowwiseParallel,
    "feed_forward.w1": ColwiseParallel,
    "feed_forward.w3": ColwiseParallel,
    "feed_forward.w2": RowwiseParallel,
}


def model() -> nn.Module:
    return Decoder(CONFIG)


def batch(model: nn.Module) -> tuple[Tensor, Tensor]:
    return make_batch(CONFIG, has_padding=True)


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)


def parallelize(model: Decoder, mesh: DeviceMesh) -> nn.Module:
    for layer in model.layers.values():
        parallelize_module(layer, mesh["tp"], {name: style() for name, style in STYLES.items()})
        fully_shard(layer, mesh=mesh["dp"])
    return fully_shard(model, mesh=mesh["dp"])


def scale_gradients(model: nn.Module, factor: float) -> None:
    for parameter in model.parameters():
        parameter.grad = parameter.grad * factor


def train_step(model, batch, optimizer, mesh: DeviceMesh | None = None):
    tokens, labels = batch
    num_tokens = (labels != IGNORED).sum()
    loss = cross_entropy(model(tokens), labels, reduction="sum")
    loss.backward()
    loss, dp_degree = loss.detach(), 1
    if mesh is not None:
        dp_degree = mesh["dp"].size()
        group = None if BUGGY else mesh.get_group("dp")
        dist.all_reduce(num_tokens, group=group)  # BUG
        dist.all_reduce(loss, group=group)
    scale_gradients(model, dp_degree / num_tokens.item())
    optimizer.step()
    optimizer.zero_grad()
    return loss / num_tokens
