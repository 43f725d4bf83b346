"""A distributed sampler that never learns the epoch, so that it repeats the first order."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from benchmarks.silent.case import Case, is_buggy
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

CASE = Case(
    source="classic",
    summary="Without set_epoch() every epoch has the order, and the batches, of the first one. "
    "The loss looks right; the model overfits to the composition of the batches.",
    mesh={"dp": 2},
    causes=("stale", "randomness"),
    locations=("the inputs*",),
    num_steps=3,
)
BUGGY = is_buggy()
SIZE, BATCH = 16, 8


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 16), nn.GELU())
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


class Trainer:
    """The optimizer, and the epoch that comes next."""

    def __init__(self, model: nn.Module) -> None:
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        self.epoch = 0


def model() -> nn.Module:
    return Model()


def batch(model: nn.Module) -> tuple[Tensor, Tensor]:
    """The entire dataset; a training step takes the first batch of an epoch."""
    return torch.randn(SIZE, 6), torch.randint(0, 3, (SIZE,))


def optimizer(model: nn.Module) -> Trainer:
    return Trainer(model)


def parallelize(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return DistributedDataParallel(model, process_group=mesh.get_group("dp"))


def first_batch(data: tuple[Tensor, Tensor], epoch: int, mesh: DeviceMesh | None) -> list[Tensor]:
    """The first batch of an epoch: of this rank, or of a single device."""
    dataset = TensorDataset(*data)
    size, rank = (1, 0) if mesh is None else (mesh.size(), mesh.get_local_rank("dp"))
    sampler = DistributedSampler(dataset, num_replicas=size, rank=rank, seed=1)
    if not BUGGY or mesh is None:
        sampler.set_epoch(epoch)
    loader = DataLoader(dataset, BATCH // size, sampler=sampler)
    return next(iter(loader))  # BUG


def train_step(model, batch, optimizer, mesh=None):
    inputs, labels = first_batch(batch, optimizer.epoch, mesh)
    optimizer.optimizer.zero_grad()
    loss = F.cross_entropy(model(inputs), labels)
    loss.backward()
    optimizer.optimizer.step()
    optimizer.epoch += 1
