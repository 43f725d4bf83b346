"""Clipping that scales only the gradients that the rank has counted in their norm."""

from __future__ import annotations

import torch
import torch.distributed as dist
from benchmarks.silent.case import Case, is_buggy
from benchmarks.silent.correct_by_hand import Group
from benchmarks.silent.decoder import Config, Decoder, cross_entropy, make_batch
from benchmarks.silent.decoder_by_hand import apply_tp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

CASE = Case(
    source="TrainCheck deepspeed-1801",
    summary="For the norm, the first tensor-parallel rank counts the gradients of replicated "
    "parameters. The list of counted gradients is then clipped, so that the other ranks do not "
    "clip those of norms: these weights diverged while BLOOM-176B was trained.",
    mesh={"tp": 2},
    causes=("clipping",),
    locations=("gradient clipping",),
)
CONFIG = Config()
BUGGY = is_buggy()


def model() -> nn.Module:
    return Decoder(CONFIG)


def batch(model: nn.Module) -> tuple[Tensor, Tensor]:
    return make_batch(CONFIG, 4)


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def parallelize(model: Decoder, mesh: DeviceMesh) -> nn.Module:
    apply_tp(model, mesh.get_group("tp"))
    return model


def clip_grad_norm(model: nn.Module, max_norm: float, group: Group = None) -> Tensor:
    """Clip gradients by their norm over the group, which is returned."""
    rank = 0 if group is None else dist.get_rank(group)
    parameters = list(model.parameters())
    counted = [p for p in parameters if rank == 0 or getattr(p, "is_sharded", False)]
    total = torch.stack([p.grad.square().sum() for p in counted]).sum()
    if group is not None:
        dist.all_reduce(total, group=group)
    norm = total.sqrt()
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for parameter in counted if BUGGY else parameters:  # BUG
        parameter.grad.mul_(factor)
    return norm


def train_step(model, batch, optimizer, mesh: DeviceMesh | None = None):
    tokens, labels = batch
    optimizer.zero_grad()
    loss = cross_entropy(model(tokens), labels)
    loss.backward()
    norm = clip_grad_norm(model, 0.1, None if mesh is None else mesh.get_group("tp"))
    optimizer.step()
    return loss.detach(), norm
