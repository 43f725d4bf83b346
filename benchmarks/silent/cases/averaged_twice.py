"""A loss that is divided by the number of ranks although DDP averages gradients."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from benchmarks.silent.case import Case, is_buggy
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

CASE = Case(
    source="classic",
    summary="The step divides the loss by the number of ranks, as a step without DDP that sums "
    "gradients would. The learning rate is half of what it seems to be.",
    mesh={"dp": 2},
    causes=("double_reduction",),
    locations=("all gradients", "the loss"),
    batch_axes=("dp",),
)
BUGGY = is_buggy()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(6, 12, batch_first=True)
        self.head = nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)[0][:, -1])


def model() -> nn.Module:
    return Model()


def batch(model: nn.Module) -> tuple[Tensor, Tensor]:
    return torch.randn(8, 5, 6), torch.randn(8, 4)


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def parallelize(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return DistributedDataParallel(model, process_group=mesh.get_group("dp"))


def train_step(model, batch, optimizer, mesh=None):
    inputs, targets = batch
    optimizer.zero_grad()
    loss = F.mse_loss(model(inputs), targets)
    size = mesh.size() if mesh is not None and BUGGY else 1
    (loss / size).backward()  # BUG
    optimizer.step()
