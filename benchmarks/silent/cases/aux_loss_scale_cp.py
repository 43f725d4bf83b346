"""The loss that balances experts is not scaled by the number of context-parallel ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from benchmarks.silent.case import Case, is_buggy
from benchmarks.silent.correct_by_hand import Group
from benchmarks.silent.decoder import Config, Decoder, Router, cross_entropy, make_batch
from benchmarks.silent.decoder_by_hand import (
    AttachedLoss,
    apply_cp,
    reduce_gradients,
    shard_sequence,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

CASE = Case(
    source="Megatron-LM pull request 2237",
    summary="Gradients are averaged over context-parallel ranks, so the loss of each rank is "
    "multiplied by their number. The loss that balances experts, whose gradient starts inside the "
    "router, is not: experts are balanced less, the more ranks there are. The loss is right.",
    mesh={"cp": 2},
    causes=("scaled", "double_reduction"),
    locations=("layers.*.moe.router", "layers.*.moe.router.gate"),
)
CONFIG = Config(num_experts=4, top_k=2)
COEFFICIENT = 0.1
BUGGY = is_buggy()


class BalancedRouter(Router):
    """A router with a loss that is least where all experts get the same number of tokens."""

    group: Group = None  # of the ranks that have other tokens of the same sequences

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.gate(x).softmax(-1)
        weights, chosen = scores.topk(self.top_k, -1)
        counts = chosen.flatten().bincount(minlength=scores.shape[-1])
        num_tokens = torch.tensor(len(x))
        if self.group is not None:
            dist.all_reduce(counts, group=self.group)
            dist.all_reduce(num_tokens, group=self.group)
        loads = counts * scores.shape[-1] / (num_tokens * self.top_k)
        loss = COEFFICIENT * (loads * scores.sum(0) / num_tokens).sum()
        return AttachedLoss.apply(weights, loss), chosen


def model() -> nn.Module:
    decoder = Decoder(CONFIG)
    for layer in decoder.layers.values():
        layer.moe.router = BalancedRouter(CONFIG)
    return decoder


def batch(model: nn.Module) -> tuple[Tensor, Tensor]:
    return make_batch(CONFIG, 4)


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def parallelize(model: Decoder, mesh: DeviceMesh) -> nn.Module:
    group = mesh.get_group("cp")
    apply_cp(model, group)
    for layer in model.layers.values():
        layer.moe.router.group = group
    return model


def train_step(model, batch, optimizer):
    tokens, labels = batch
    optimizer.zero_grad()
    AttachedLoss.scale = 1.0
    loss = cross_entropy(model(tokens), labels)
    loss.backward()
    optimizer.step()
    return loss.detach()


def parallel_train_step(model, batch, optimizer, mesh):
    group, size = mesh.get_group("cp"), mesh["cp"].size()
    tokens, labels, positions, mask = shard_sequence(batch, mesh)
    optimizer.zero_grad()
    AttachedLoss.scale = 1.0 if BUGGY else float(size)  # BUG
    loss = cross_entropy(model(tokens, positions, mask), labels, reduction="sum")
    loss = loss / batch[1].numel()
    (loss * size).backward()
    reduce_gradients(model, group, dist.ReduceOp.AVG)
    optimizer.step()
    loss = loss.detach()
    dist.all_reduce(loss, group=group)
    return loss
