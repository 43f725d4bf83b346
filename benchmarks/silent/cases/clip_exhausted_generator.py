"""A function that clips gradients and uses up the generator of parameters that it gets."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from benchmarks.silent.case import Case, is_buggy
from benchmarks.silent.decoder import Config, Decoder, cross_entropy, make_batch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

CASE = Case(
    source="torchtitan 775a486ed",
    summary="The trainer's own function for distributed clipping takes the gradients out of the "
    "parameters, then passes the parameters on. If they are a generator, nothing is left to clip, "
    "while the norm that it returns is right.",
    mesh={"dp": 2},
    causes=("clipping",),
    locations=("gradient clipping",),
    batch_axes=("dp",),
)
CONFIG = Config()
BUGGY = is_buggy()


def model() -> nn.Module:
    return Decoder(CONFIG)


def batch(model: nn.Module) -> tuple[Tensor, Tensor]:
    return make_batch(CONFIG)


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def parallelize(model: Decoder, mesh: DeviceMesh) -> nn.Module:
    for layer in model.layers.values():
        fully_shard(layer, mesh=mesh["dp"])
    return fully_shard(model, mesh=mesh["dp"])


def clip_grad_norm(parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
    """Clip gradients by their norm over all ranks, which is returned."""
    if not BUGGY:
        parameters = list(parameters)
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norm = nn.utils.get_total_norm(gradients)
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)  # BUG
    return norm


def train_step(model, batch, optimizer):
    tokens, labels = batch
    optimizer.zero_grad()
    loss = cross_entropy(model(tokens), labels)
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    return norm


def parallel_train_step(model, batch, optimizer):
    tokens, labels = batch
    optimizer.zero_grad()
    loss = cross_entropy(model(tokens), labels)
    loss.backward()
    norm = clip_grad_norm(model.parameters(), 0.1)
    optimizer.step()
    return norm
