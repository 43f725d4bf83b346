"""Small models and worlds in which every collective can be counted by hand, shared by all tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from shardscope import Recording, Trace
from shardscope.record import Collective, Gap

DIM = 8


def everyone() -> dist.ProcessGroup:
    """The default group."""
    assert dist.group.WORLD is not None
    return dist.group.WORLD


class Reduce(torch.autograd.Function):
    """An all-reduce in forward and another in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return funcol.all_reduce(x, "sum", everyone()) * 1

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return funcol.all_reduce(grad, "sum", everyone()) * 1


class Sum(nn.Module):
    """Adds up over the ranks, forwards and backwards."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Reduce.apply(x)


class Block(nn.Module):
    """One all-reduce in forward and one in backward, both its child's."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)
        self.sum = Sum()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.sum(self.linear(x)))


class Own(nn.Module):
    """One all-reduce in forward and one in backward, its own, after its child has run."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Reduce.apply(self.linear(x))


class Net(nn.Module):
    """An embedding and a stack of blocks."""

    def __init__(self, depth: int = 2, block: type[nn.Module] = Block) -> None:
        super().__init__()
        self.embed = nn.Linear(DIM, DIM)
        self.layers = nn.ModuleList(block() for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return x


class MLP(nn.Module):
    """Two linear layers, as tensor parallelism likes them."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(DIM, 4 * DIM, bias=False)
        self.down = nn.Linear(4 * DIM, DIM, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


def batch(num_rows: int = 4) -> torch.Tensor:
    """Rows of DIM float32 numbers: 32 bytes a row."""
    return torch.ones(num_rows, DIM)


def split_mlp(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Tensor parallelism over `mesh` for every MLP in `model`."""
    for module in model.modules():
        if isinstance(module, MLP):
            parallelize_module(module, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


def shard_net(net: Net, mesh: DeviceMesh) -> Net:
    """FSDP2 for every layer, and for the rest."""
    for layer in net.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    return net


def facts(recorded: Trace | Recording, *names: str) -> list[tuple[Any, ...]]:
    """These fields of every collective, in order."""
    recording = recorded if isinstance(recorded, Recording) else recorded.recording
    return [tuple(getattr(call, name) for name in names) for call in recording.collectives]


def only(recorded: Trace | Recording) -> Collective:
    """The one collective there is."""
    recording = recorded if isinstance(recorded, Recording) else recorded.recording
    assert recording.gaps == ()
    (call,) = recording.collectives
    return call


def gap_facts(recorded: Trace) -> list[str]:
    """What every gap says."""
    return [gap.fact for gap in gaps(recorded)]


def gaps(recorded: Trace) -> tuple[Gap, ...]:
    """What was seen and not understood."""
    return recorded.recording.gaps


@contextmanager
def alone_on_gloo() -> Iterator[None]:
    """A real process group of one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()
