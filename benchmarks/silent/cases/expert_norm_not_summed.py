"""A norm for clipping whose part of the experts is that of each rank's own experts."""

from __future__ import annotations

import torch
import torch.distributed as dist
from benchmarks.silent.case import Case, is_buggy
from benchmarks.silent.decoder import Config, Decoder, cross_entropy, make_batch
from benchmarks.silent.expert_parallel import distribute_experts
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

CASE = Case(
    source="torchtitan 92ed38aad",
    summary="The norms of experts and of all other parameters are computed apart, and completed "
    "only if they are DTensors. Those of experts in plain tensors stay local, so that each rank "
    "clips its shards with another factor. The norm that rank 0 logs looks plausible.",
    mesh={"ep": 2},
    causes=("norm",),
    locations=("the gradient norm", "gradient clipping"),
    batch_axes=("ep",),
)
CONFIG = Config(num_experts=4)
MAX_NORM = 0.1
BUGGY = is_buggy()


def model() -> nn.Module:
    return Decoder(CONFIG)


def batch(model: nn.Module) -> tuple[Tensor, Tensor]:
    return make_batch(CONFIG)


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def parallelize(model: Decoder, mesh: DeviceMesh) -> nn.Module:
    for layer in model.layers.values():
        experts = layer.moe.experts
        distribute_experts(experts, mesh.get_group("ep"))
        for weight in experts.parameters():
            weight.register_hook(lambda gradient: gradient / mesh.size())
        fully_shard(layer, mesh=mesh["ep"], ignored_params=set(experts.parameters()))
    ignored = {p for name, p in model.named_parameters() if "experts" in name}
    return fully_shard(model, mesh=mesh["ep"], ignored_params=ignored)


def clip_grad_norm(model: nn.Module, max_norm: float, mesh: DeviceMesh) -> Tensor:
    """Clip the gradients of experts and of all others by their common norm."""
    groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for name, parameter in model.named_parameters():
        groups["experts" in name].append(parameter)
    total = torch.zeros(())
    for is_expert, parameters in groups.items():
        norm = nn.utils.get_total_norm([parameter.grad for parameter in parameters])
        if isinstance(norm, DTensor):
            norm = norm.full_tensor()
        elif is_expert and not BUGGY:
            squared = norm**2
            dist.all_reduce(squared, group=mesh.get_group("ep"))
            norm = squared.sqrt()
        total = total + norm**2  # BUG
    total = total.sqrt()
    for parameters in groups.values():
        nn.utils.clip_grads_with_norm_(parameters, max_norm, total)
    return total


def train_step(model, batch, optimizer, mesh=None):
    tokens, labels = batch
    optimizer.zero_grad()
    loss = cross_entropy(model(tokens), labels)
    loss.backward()
    if mesh is None:
        norm = nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
    else:
        norm = clip_grad_norm(model, MAX_NORM, mesh)
    optimizer.step()
    return norm
