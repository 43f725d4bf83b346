"""A loss that is multiplied by the number of ranks over which its gradients are summed."""

from __future__ import annotations

import torch
import torch.distributed as dist
from benchmarks.silent.case import Case, is_buggy
from benchmarks.silent.decoder import Config, Decoder, cross_entropy, make_batch
from benchmarks.silent.decoder_by_hand import apply_cp, reduce_gradients, shard_sequence
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

CASE = Case(
    source="Megatron-LM issue 673",
    summary="The loss is the mean over the entire sequence, times the number of context-parallel "
    "ranks. That is right where gradients are averaged over these ranks; here they are summed, so "
    "that every gradient is too large by their number. Adam hides it.",
    mesh={"dp": 2, "cp": 2},
    causes=("scaled", "double_reduction"),
    locations=("the loss", "all gradients"),
    batch_axes=("dp",),
)
CONFIG = Config()
BUGGY = is_buggy()


def model() -> nn.Module:
    return Decoder(CONFIG)


def batch(model: nn.Module) -> tuple[Tensor, Tensor]:
    return make_batch(CONFIG, has_padding=True)


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def parallelize(model: Decoder, mesh: DeviceMesh) -> nn.Module:
    apply_cp(model, mesh.get_group("cp"))
    return model


def loss_function(logits: Tensor, labels: Tensor, mesh: DeviceMesh | None) -> tuple[Tensor, Tensor]:
    """The loss of this rank for backward, and the mean over all labels."""
    count = (labels >= 0).sum()
    own = cross_entropy(logits, labels, reduction="sum")
    total = own.detach().clone()
    if mesh is not None:
        dist.all_reduce(count)
        dist.all_reduce(total)
    loss = own / count
    if mesh is not None and BUGGY:
        loss = loss * mesh["cp"].size()  # BUG
    return loss, total / count


def train_step(model, batch, optimizer):
    tokens, labels = batch
    optimizer.zero_grad()
    loss, mean = loss_function(model(tokens), labels, None)
    loss.backward()
    optimizer.step()
    return mean


def parallel_train_step(model, batch, optimizer, mesh):
    tokens, labels, positions, mask = shard_sequence(batch, mesh)
    optimizer.zero_grad()
    loss, mean = loss_function(model(tokens, positions, mask), labels, mesh)
    loss.backward()
    reduce_gradients(model, mesh.get_group("cp"))
    reduce_gradients(model, mesh.get_group("dp"))
    optimizer.step()
    return mean
