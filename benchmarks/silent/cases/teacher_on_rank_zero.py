"""A teacher that follows the model by a moving average, on rank 0 only."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from benchmarks.silent.case import Case, is_buggy
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

CASE = Case(
    source="classic",
    summary="The moving average is updated under `if rank == 0`, which saves the checkpoints. The "
    "other ranks learn from the teacher of the first step.",
    mesh={"dp": 2},
    causes=("out_of_sync", "stale"),
    locations=("teacher*",),
    batch_axes=("dp",),
    num_steps=3,
)
BUGGY = is_buggy()


def make_network() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4))


class Model(nn.Module):
    """A student, and its teacher, which has no gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = make_network(), make_network()
        self.teacher.requires_grad_(False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            target = self.teacher(x)
        return self.student(x), target


def model() -> nn.Module:
    return Model()


def batch(model: nn.Module) -> tuple[Tensor, Tensor]:
    return torch.randn(8, 6), torch.randn(8, 4)


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


def parallelize(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return DistributedDataParallel(model, process_group=mesh.get_group("dp"))


@torch.no_grad()
def update_teacher(model: Model) -> None:
    for old, new in zip(model.teacher.parameters(), model.student.parameters(), strict=True):
        old.lerp_(new, 0.2)


def train_step(model, batch, optimizer):
    inputs, targets = batch
    optimizer.zero_grad()
    prediction, taught = model(inputs)
    loss = F.mse_loss(prediction, targets) + 0.5 * F.mse_loss(prediction, taught)
    loss.backward()
    optimizer.step()
    if not dist.is_initialized() or dist.get_rank() == 0 or not BUGGY:  # BUG
        update_teacher(model.module if isinstance(model, DistributedDataParallel) else model)
