"""Gradient accumulation whose last micro-batch is also inside no_sync()."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from benchmarks.silent.case import Case, is_buggy
from benchmarks.silent.decoder import Config, Decoder, cross_entropy, make_batch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

CASE = Case(
    source="classic",
    summary="The micro-batch that should synchronise is counted from one and compared with an "
    "index that starts at zero. DDP never reduces; the replicas drift apart.",
    mesh={"dp": 2},
    causes=("missing_reduction",),
    locations=("all gradients",),
    batch_axes=("dp",),
)
CONFIG = Config(num_layers=1)
NUM_MICRO = 2
BUGGY = is_buggy()


def model() -> nn.Module:
    return Decoder(CONFIG)


def batch(model: nn.Module) -> tuple[Tensor, Tensor]:
    return make_batch(CONFIG)


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def parallelize(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return DistributedDataParallel(model, process_group=mesh.get_group("dp"))


def micro_context(model: nn.Module, index: int):
    """No synchronisation before the last micro-batch."""
    last = NUM_MICRO if BUGGY else NUM_MICRO - 1
    is_synced = index == last or not isinstance(model, DistributedDataParallel)
    return nullcontext() if is_synced else model.no_sync()  # BUG


def train_step(model, batch, optimizer):
    tokens, labels = batch
    optimizer.zero_grad()
    total = 0.0
    micro_batches = zip(tokens.chunk(NUM_MICRO), labels.chunk(NUM_MICRO), strict=True)
    for index, (inputs, targets) in enumerate(micro_batches):
        with micro_context(model, index):
            loss = cross_entropy(model(inputs), targets) / NUM_MICRO
            loss.backward()
        total += loss.detach()
    optimizer.step()
