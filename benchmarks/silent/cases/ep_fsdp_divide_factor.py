"""FSDP of experts on the data ranks that remain beside expert parallelism, divided by those."""

from __future__ import annotations

import torch
import torch.distributed as dist
from benchmarks.silent.case import Case, is_buggy
from benchmarks.silent.decoder import Config, Decoder, cross_entropy, make_batch
from benchmarks.silent.expert_parallel import distribute_experts
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

CASE = Case(
    source="torchtitan 59e57a4bb",
    summary="Experts are sharded over ep and then by FSDP over dp only, which divides their "
    "gradients by the size of dp. Their tokens come from all ranks of dp and ep, so that the "
    "gradients of experts are too large by the size of ep, and all others are right.",
    mesh={"dp": 2, "ep": 2},
    causes=("scaled", "double_reduction"),
    locations=("layers.*.moe.experts", "layers.1.moe.experts"),
    batch_axes=("dp", "ep"),
)
CONFIG = Config(num_experts=4, first_moe_layer=1)
BUGGY = is_buggy()


def model() -> nn.Module:
    return Decoder(CONFIG)


def batch(model: nn.Module) -> tuple[Tensor, Tensor]:
    return make_batch(CONFIG)


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def parallelize(model: Decoder, mesh: DeviceMesh) -> nn.Module:
    data_mesh = mesh["dp", "ep"]
    for layer in model.layers.values():
        if hasattr(layer, "moe"):
            distribute_experts(layer.moe.experts, mesh.get_group("ep"))
            fully_shard(layer.moe.experts, mesh=mesh["dp"])  # BUG
            if not BUGGY:
                layer.moe.experts.set_gradient_divide_factor(float(data_mesh.size()))
        fully_shard(layer, mesh=data_mesh)
    return fully_shard(model, mesh=data_mesh)


def train_step(model, batch, optimizer, mesh=None):
    tokens, labels = batch
    optimizer.zero_grad()
    loss = cross_entropy(model(tokens), labels)
    loss.backward()
    optimizer.step()
    loss = loss.detach()
    if mesh is not None:
        dist.all_reduce(loss)
        loss /= mesh.size()
    return loss
