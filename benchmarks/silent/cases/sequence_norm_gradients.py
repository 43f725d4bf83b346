"""Sequence parallelism whose norms never sum their gradients over tp."""

from __future__ import annotations

import torch
import torch.distributed as dist
from benchmarks.silent.case import Case, is_buggy
from benchmarks.silent.correct_by_hand import (
    Gather,
    GatherForAll,
    ReduceScatter,
    Scatter,
    keep_part,
)
from benchmarks.silent.decoder import Config, Decoder, cross_entropy, make_batch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

CASE = Case(
    source="classic",
    summary="With sequence parallelism each rank's norms see a part of the sequence. Their weights "
    "are copies, whose gradients have to be summed over tp; without that the copies drift apart.",
    mesh={"tp": 2},
    causes=("missing_reduction",),
    locations=("*norm*",),
)
CONFIG = Config()
BUGGY = is_buggy()


def model() -> nn.Module:
    return Decoder(CONFIG)


def batch(model: nn.Module) -> tuple[Tensor, Tensor]:
    return make_batch(CONFIG, 4)


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def shard_pair(module: nn.Module, columns: list[str], rows: str, group) -> None:
    for name in columns:
        keep_part(getattr(module, name), "weight", 0, group)
    keep_part(getattr(module, rows), "weight", 1, group)
    module.register_forward_pre_hook(
        lambda _, inputs: (Gather.apply(inputs[0], 1, group), *inputs[1:])
    )
    getattr(module, rows).register_forward_hook(
        lambda _, __, output: ReduceScatter.apply(output, 1, group)
    )


def parallelize(model: Decoder, mesh: DeviceMesh) -> nn.Module:
    group = mesh.get_group("tp")
    model.tok_embeddings.register_forward_hook(lambda _, __, x: Scatter.apply(x, 1, group))
    for layer in model.layers.values():
        shard_pair(layer.attention, ["wq", "wk", "wv"], "wo", group)
        shard_pair(layer.feed_forward, ["w1", "w3"], "w2", group)
    model.norm.register_forward_hook(lambda _, __, x: GatherForAll.apply(x, 1, group))
    return model


def reduce_norm_gradients(model: nn.Module, mesh: DeviceMesh) -> None:
    """Sum the gradients of the copies that see a part of the sequence."""
    for name, parameter in model.named_parameters():
        is_norm = name == "norm.weight" if BUGGY else "norm" in name
        if is_norm:  # BUG
            dist.all_reduce(parameter.grad, group=mesh.get_group("tp"))


def train_step(model, batch, optimizer, mesh=None):
    tokens, labels = batch
    optimizer.zero_grad()
    loss = cross_entropy(model(tokens), labels)
    loss.backward()
    if mesh is not None:
        reduce_norm_gradients(model, mesh)
    optimizer.step()
    return loss.detach()
