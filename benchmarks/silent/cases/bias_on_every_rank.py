"""A row-parallel layer by hand that adds its bias before the all-reduce."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from benchmarks.silent.case import Case, is_buggy
from benchmarks.silent.correct_by_hand import Copy, Reduce, keep_part
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

CASE = Case(
    source="classic",
    summary="Each rank of tp adds the bias to its partial sum, so that the all-reduce adds it as "
    "many times as there are ranks. Training goes on as if with another initialization.",
    mesh={"tp": 2},
    causes=("double_reduction",),
    locations=("blocks.*.down", "blocks.*"),
)
BUGGY = is_buggy()
DIM, HIDDEN = 12, 24


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.up, self.down = nn.Linear(DIM, HIDDEN), nn.Linear(HIDDEN, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(DIM, 5)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class ColumnParallel(nn.Module):
    """A part of the outputs on each rank."""

    def __init__(self, linear: nn.Linear, group) -> None:
        super().__init__()
        self.weight, self.bias, self.group = linear.weight, linear.bias, group
        keep_part(self, "weight", 0, group)
        keep_part(self, "bias", 0, group)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(Copy.apply(x, self.group), self.weight, self.bias)


class RowParallel(nn.Module):
    """A part of the inputs on each rank."""

    def __init__(self, linear: nn.Linear, group) -> None:
        super().__init__()
        self.weight, self.bias, self.group = linear.weight, linear.bias, group
        keep_part(self, "weight", 1, group)

    def forward(self, x: Tensor) -> Tensor:
        if BUGGY:
            return Reduce.apply(F.linear(x, self.weight, self.bias), self.group)  # BUG
        return Reduce.apply(F.linear(x, self.weight), self.group) + self.bias


def model() -> nn.Module:
    return Model()


def batch(model: nn.Module) -> tuple[Tensor, Tensor]:
    return torch.randn(8, DIM), torch.randint(0, 5, (8,))


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def parallelize(model: Model, mesh: DeviceMesh) -> nn.Module:
    group = mesh.get_group("tp")
    for block in model.blocks:
        block.up = ColumnParallel(block.up, group)
        block.down = RowParallel(block.down, group)
    return model


def train_step(model, batch, optimizer):
    inputs, targets = batch
    optimizer.zero_grad()
    loss = F.cross_entropy(model(inputs), targets)
    loss.backward()
    optimizer.step()
    return loss.detach()
