"""Data parallelism by properties that averages experts' gradients over too few ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from benchmarks.silent.case import Case, is_buggy
from benchmarks.silent.decoder import Config, Decoder, GroupedExperts, cross_entropy, make_batch
from benchmarks.silent.expert_parallel import distribute_experts
from benchmarks.silent.simple_fsdp import shard_parameters
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard

CASE = Case(
    source="torchtitan f014f31c2",
    summary="The gradients of all parameters are averaged over the mesh that shards them. That of "
    "the experts lacks the ranks of ep, whose tokens they get, so that experts learn with a "
    "larger learning rate than the rest of the model, or with AdamW are decayed less.",
    mesh={"dp": 2, "ep": 2},
    causes=("scaled", "double_reduction"),
    locations=("layers.*.moe.experts", "layers.*.moe.experts.w*"),
    batch_axes=("dp", "ep"),
)
CONFIG = Config(num_experts=4, has_shared_expert=True)
BUGGY = is_buggy()


def model() -> nn.Module:
    return Decoder(CONFIG)


def batch(model: nn.Module) -> tuple[Tensor, Tensor]:
    return make_batch(CONFIG)


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def data_parallel(module: nn.Module, mesh: DeviceMesh, divide_factor: int | None = None) -> None:
    """Shard parameters; average their gradients, or divide the sum by a number."""
    placements = [*[Replicate()] * (mesh.ndim - 1), Shard(0)]
    if divide_factor is None:
        shard_parameters(module, mesh, placements, [Partial("avg")] * mesh.ndim)
    else:
        gradients = [Partial("sum")] * mesh.ndim
        shard_parameters(module, mesh, placements, gradients, 1 / divide_factor)


def parallelize(model: Decoder, mesh: DeviceMesh) -> nn.Module:
    for module in model.modules():
        if not isinstance(module, GroupedExperts):
            data_parallel(module, mesh)
            continue
        distribute_experts(module, mesh.get_group("ep"))
        if BUGGY:
            data_parallel(module, mesh["dp"])  # BUG
        else:
            data_parallel(module, mesh["dp"], divide_factor=mesh.size())
    return model


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
