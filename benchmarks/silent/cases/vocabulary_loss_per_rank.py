"""Cross entropy over a vocabulary of which each rank takes the softmax of its own part."""

from __future__ import annotations

import torch
import torch.distributed as dist
from benchmarks.silent.case import Case, is_buggy
from benchmarks.silent.correct_by_hand import Copy, Reduce, keep_part
from benchmarks.silent.decoder import Config, Decoder, cross_entropy, make_batch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

CASE = Case(
    source="classic",
    summary="The logit of the label comes from the rank that has it, but the sum of exponentials "
    "is that of the rank's own part of the vocabulary. The loss is too small and decreases.",
    mesh={"tp": 2},
    causes=("missing_reduction",),
    locations=("the loss",),
)
CONFIG = Config(num_layers=1)
BUGGY = is_buggy()


def model() -> nn.Module:
    return Decoder(CONFIG)


def batch(model: nn.Module) -> tuple[Tensor, Tensor]:
    return make_batch(CONFIG, 4)


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def parallelize(model: Decoder, mesh: DeviceMesh) -> nn.Module:
    """The head has a part of the vocabulary; everything else is replicated."""
    group = mesh.get_group("tp")
    keep_part(model.output, "weight", 0, group)
    model.output.register_forward_pre_hook(lambda _, inputs: (Copy.apply(inputs[0], group),))
    return model


def vocabulary_cross_entropy(logits: Tensor, labels: Tensor, group) -> Tensor:
    """The mean cross entropy of logits of which this rank has a part of the vocabulary."""
    largest = logits.detach().amax(-1)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    shifted = logits - largest[..., None]
    sums = shifted.exp().sum(-1)  # BUG
    if not BUGGY:
        sums = Reduce.apply(sums, group)
    local = labels - dist.get_rank(group) * logits.shape[-1]
    is_other = (local < 0) | (local >= logits.shape[-1])
    chosen = shifted.gather(-1, local.masked_fill(is_other, 0)[..., None])[..., 0]
    chosen = Reduce.apply(chosen.masked_fill(is_other, 0.0), group)
    return (sums.log() - chosen).mean()


def train_step(model, batch, optimizer):
    tokens, labels = batch
    optimizer.zero_grad()
    loss = cross_entropy(model(tokens), labels)
    loss.backward()
    optimizer.step()
    return loss.detach()


def parallel_train_step(model, batch, optimizer, mesh):
    tokens, labels = batch
    optimizer.zero_grad()
    loss = vocabulary_cross_entropy(model(tokens), labels, mesh.get_group("tp"))
    loss.backward()
    optimizer.step()
    return loss.detach()
