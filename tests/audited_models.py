"""Sharded models to audit, the same on a real process group and in a simulated world.

`python audited_models.py FOLDER` audits them as one rank of a real gloo group and saves what it
found as FOLDER/NAME-RANK.json.gz.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from shardscope import Recording, World, audit, save
from shardscope.record import Finding

CPU = torch.device("cpu")


class Unit(nn.Module):
    """Two linear layers with something between them that is saved, and something that is not."""

    mask: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 10)
        self.norm = nn.BatchNorm1d(10)
        self.down = nn.Linear(10, 6)
        self.register_buffer("mask", torch.ones(6), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.norm(self.up(x))) * self.mask


class Tied(nn.Module):
    """An embedding, units, and a head that is the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.units = nn.ModuleList([Unit(), Unit()])
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(x)
        for unit in self.units:
            hidden = unit(hidden)
        return self.head(hidden)


def shard_by_fsdp_and_tp() -> nn.Module:
    """On a mesh of n/2 × 2, with sizes that do not divide, a compiled and a checkpointed unit."""
    shape = (dist.get_world_size() // 2, 2)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
    model = Tied()
    for unit in model.units:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(unit, mesh["tp"], plan)
    model.units[0] = torch.compile(checkpoint_wrapper(model.units[0]), backend="eager")  # type: ignore[assignment]
    for unit in model.units:
        fully_shard(unit, mesh=mesh["dp"])
    return fully_shard(model, mesh=mesh["dp"], reshard_after_forward=False)


def shard_by_hsdp() -> nn.Module:
    """Over half of the ranks, replicated over the other half."""
    shape = (2, dist.get_world_size() // 2)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicas", "shards"))
    return fully_shard(Tied(), mesh=mesh)


def shard_by_fsdp1() -> nn.Module:
    """With the user's parameters in view."""
    model = Tied()
    for index, unit in enumerate(model.units):
        model.units[index] = FullyShardedDataParallel(unit, device_id=CPU, use_orig_params=True)
    return FullyShardedDataParallel(model, device_id=CPU, use_orig_params=True)


def shard_by_hiding_fsdp1() -> nn.Module:
    """With flat parameters in place of the user's."""
    model = Tied()
    for index, unit in enumerate(model.units):
        model.units[index] = FullyShardedDataParallel(unit, device_id=CPU)
    return FullyShardedDataParallel(model, device_id=CPU)


def replicate_by_ddp() -> nn.Module:
    """As it is on every rank."""
    return DistributedDataParallel(Tied())


FIRST = {"0.up": ColwiseParallel(), "0.down": RowwiseParallel()}
PLAN = {"*.up": ColwiseParallel(), "*.down": RowwiseParallel()}


class Mlp(nn.Module):
    """Two linear layers."""

    def __init__(self, hidden: int = 16) -> None:
        super().__init__()
        self.up = nn.Linear(8, hidden, bias=False)
        self.down = nn.Linear(hidden, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).relu())


def found(recording: Recording, rule: str) -> list[Finding]:
    """The findings of one kind."""
    return [finding for finding in recording.findings if finding.rule == rule]


def only_finding(recording: Recording, rule: str) -> Finding:
    """The only finding of one kind."""
    (finding,) = found(recording, rule)
    return finding


def stack(world: World, *, hidden: int = 16, has_root: bool = True) -> nn.Sequential:
    """Two MLPs, right in every way: tensor parallel, then FSDP on each, then on all."""
    model = nn.Sequential(Mlp(hidden), Mlp(hidden))
    parallelize_module(model, world.mesh["tp"], PLAN)
    for block in model:
        fully_shard(block, mesh=world.mesh["dp"])
    return fully_shard(model, mesh=world.mesh["dp"]) if has_root else model


SHARDED: dict[str, Callable[[], nn.Module]] = {
    function.__name__: function
    for function in (
        shard_by_fsdp_and_tp,
        shard_by_hsdp,
        shard_by_fsdp1,
        shard_by_hiding_fsdp1,
        replicate_by_ddp,
    )
}


def audit_named(name: str) -> Recording:
    """The audit of one of these models."""
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # FSDP1 is deprecated
        return audit(SHARDED[name]())


def main() -> None:
    """Run as one rank, with the variables of a launcher set."""
    folder = Path(sys.argv[1])
    dist.init_process_group("gloo")
    for name in SHARDED:
        save(audit_named(name), folder / f"{name}-{dist.get_rank()}.json.gz")
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # torch's gloo now and then aborts a process as it ends, without us too


if __name__ == "__main__":
    main()
