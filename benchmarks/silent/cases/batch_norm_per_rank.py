"""Data parallelism whose batch norm sees the batch of its own rank only."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from benchmarks.silent.case import Case, is_buggy
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.nn.functional import all_reduce
from torch.nn.parallel import DistributedDataParallel

CASE = Case(
    source="classic",
    summary="With a small batch on each rank, the statistics of batch norm are those of a few "
    "samples, and the running averages, which DDP broadcasts, those of rank 0's samples.",
    mesh={"dp": 2},
    causes=("missing_reduction",),
    locations=("features.*",),
    batch_axes=("dp",),
)
BUGGY = is_buggy()


class SyncedBatchNorm(nn.BatchNorm2d):
    """Batch norm over the samples of all ranks, as SyncBatchNorm, which has no CPU kernel."""

    group = None

    def forward(self, x: Tensor) -> Tensor:
        size = torch.distributed.get_world_size(self.group)
        mean = all_reduce(x.mean((0, 2, 3)), group=self.group) / size
        centered = x - mean[:, None, None]
        variance = all_reduce(centered.square().mean((0, 2, 3)), group=self.group) / size
        number = size * x.numel() // x.shape[1]
        with torch.no_grad():
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(variance * number / (number - 1), self.momentum)
            self.num_batches_tracked.add_(1)
        scale = self.weight * (variance + self.eps).rsqrt()
        return centered * scale[:, None, None] + self.bias[:, None, None]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Conv2d(8, 8, 3, padding=1, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(),
        )
        self.classifier = nn.Linear(8, 6)

    def forward(self, images: Tensor) -> Tensor:
        return self.classifier(self.features(images).mean((2, 3)))


def model() -> nn.Module:
    return Model()


def batch(model: nn.Module) -> tuple[Tensor, Tensor]:
    return torch.randn(8, 3, 6, 6), torch.randint(0, 6, (8,))


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)


def synchronise(model: Model, mesh: DeviceMesh) -> None:
    for index, module in enumerate(model.features):
        if isinstance(module, nn.BatchNorm2d):
            synced = SyncedBatchNorm(module.num_features)
            synced.load_state_dict(module.state_dict())
            synced.to(module.weight.dtype).group = mesh.get_group("dp")
            model.features[index] = synced


def parallelize(model: Model, mesh: DeviceMesh) -> nn.Module:
    if not BUGGY:
        synchronise(model, mesh)
    return DistributedDataParallel(model, process_group=mesh.get_group("dp"))  # BUG


def train_step(model, batch, optimizer):
    images, labels = batch
    optimizer.zero_grad()
    loss = F.cross_entropy(model(images), labels)
    loss.backward()
    optimizer.step()
