"""A reported loss that averages the means of ranks with different numbers of tokens."""

from __future__ import annotations

import torch
import torch.distributed as dist
from benchmarks.silent.case import Case, is_buggy
from benchmarks.silent.decoder import IGNORED, Config, Decoder, cross_entropy, make_batch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

CASE = Case(
    source="classic",
    summary="The gradients are those of the mean over all tokens. The reported loss is the mean "
    "over ranks of their own means, which weights tokens of padded samples more.",
    mesh={"dp": 2},
    causes=("scaled",),
    locations=("returned*",),
    batch_axes=("dp",),
)
CONFIG = Config(num_layers=1)
BUGGY = is_buggy()


def model() -> nn.Module:
    return Decoder(CONFIG)


def batch(model: nn.Module) -> tuple[Tensor, Tensor]:
    return make_batch(CONFIG, has_padding=True)


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def parallelize(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return DistributedDataParallel(model, process_group=mesh.get_group("dp"))


def reported_loss(total: Tensor, labels: Tensor, mesh: DeviceMesh | None) -> float:
    """The mean loss over the tokens of all ranks."""
    count = (labels != IGNORED).sum()
    if mesh is None:
        return (total / count).item()
    if BUGGY:
        mean = total / count
        dist.all_reduce(mean, group=mesh.get_group("dp"))
        return (mean / mesh.size()).item()  # BUG
    dist.all_reduce(total, group=mesh.get_group("dp"))
    dist.all_reduce(count, group=mesh.get_group("dp"))
    return (total / count).item()


def train_step(model, batch, optimizer, mesh=None):
    tokens, labels = batch
    optimizer.zero_grad()
    total = cross_entropy(model(tokens), labels, reduction="sum")
    count = (labels != IGNORED).sum()
    if mesh is not None:
        dist.all_reduce(count, group=mesh.get_group("dp"))
    size = 1 if mesh is None else mesh.size()  # DDP averages over the ranks
    (total * size / count).backward()
    optimizer.step()
    return reported_loss(total.detach(), labels, mesh)
