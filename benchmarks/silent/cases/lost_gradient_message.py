"""A message with gradients that arrives as zeros at one of the ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from benchmarks.silent.case import Case, is_buggy
from benchmarks.silent.correct_by_hand import Group, pass_along
from benchmarks.silent.decoder import Config, Decoder, cross_entropy, make_batch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

CASE = Case(
    source="TrainCheck pytorch-84803 (and pytorch-96600, baichuan2-86)",
    summary="Peer-to-peer copies between some GPUs lost data, so that tensors arrived as zeros. "
    "Here a ring sums the gradients of each layer, and the last rank gets zeros for layer 1: its "
    "replica lacks the gradient of its neighbour and drifts away.",
    mesh={"dp": 2},
    causes=("missing_reduction",),
    locations=("layers.1", "layers.1.*"),
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


def receive(bucket: Tensor, name: str, group: Group) -> Tensor:
    """What the rank before this one in the ring has sent."""
    received = pass_along(bucket, 1, group)
    is_last = dist.get_rank(group) == dist.get_world_size(group) - 1
    if BUGGY and is_last and name == "layers.1":
        received = torch.zeros_like(received)  # BUG
    return received


def reduce_in_ring(model: Decoder, group: Group) -> None:
    """Average the gradients of each layer, and of the other parameters, in a ring."""
    buckets = {f"layers.{name}": list(x.parameters()) for name, x in model.layers.items()}
    inner = {id(parameter) for parameters in buckets.values() for parameter in parameters}
    buckets["others"] = [p for p in model.parameters() if id(p) not in inner]
    size = dist.get_world_size(group)
    for name, parameters in buckets.items():
        part = torch.cat([parameter.grad.flatten() for parameter in parameters])
        total = part.clone()
        for _ in range(size - 1):
            part = receive(part, name, group)
            total += part
        sizes = [parameter.numel() for parameter in parameters]
        for parameter, gradient in zip(parameters, (total / size).split(sizes), strict=True):
            parameter.grad.copy_(gradient.view_as(parameter))


def train_step(model, batch, optimizer, mesh: DeviceMesh | None = None):
    tokens, labels = batch
    optimizer.zero_grad()
    loss = cross_entropy(model(tokens), labels)
    loss.backward()
    loss = loss.detach()
    if mesh is not None:
        reduce_in_ring(model, mesh.get_group("dp"))
        dist.all_reduce(loss, op=dist.ReduceOp.AVG, group=mesh.get_group("dp"))
    optimizer.step()
    return loss
