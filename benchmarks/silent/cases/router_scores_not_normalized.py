"""A router of a parallel port that does not normalise the scores of the chosen experts."""

from __future__ import annotations

import torch
import torch.distributed as dist
from benchmarks.silent.case import Case, is_buggy
from benchmarks.silent.decoder import Config, Decoder, Router, cross_entropy, make_batch
from benchmarks.silent.expert_parallel import distribute_experts
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

CASE = Case(
    source="torchtitan 41753c67b",
    summary="The original model takes the softmax of the chosen experts' logits. The router of the "
    "parallel port takes it over all experts, and its option to normalise the chosen scores is "
    "off, so that the experts' outputs are too small by another factor for each token.",
    mesh={"ep": 2},
    causes=("scaled",),
    locations=("layers.*.moe.router", "layers.*.moe"),
    batch_axes=("ep",),
)
CONFIG = Config(num_experts=8, top_k=2)
BUGGY = is_buggy()


class OriginalRouter(Router):
    """Scores that are normalised over the chosen experts."""

    def __init__(self, config: Config) -> None:
        super().__init__(config, has_bias=True)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits, chosen = self.gate(x).topk(self.top_k, -1)
        return logits.softmax(-1), chosen


class PortedRouter(nn.Module):
    """Scores over all experts, which may be normalised over the chosen ones."""

    def __init__(self, gate: nn.Linear, top_k: int, *, is_normalized: bool = False) -> None:
        super().__init__()
        self.gate, self.top_k, self.is_normalized = gate, top_k, is_normalized

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores, chosen = self.gate(x).softmax(-1).topk(self.top_k, -1)
        if self.is_normalized:
            scores = scores / scores.sum(-1, keepdim=True)
        return scores, chosen


def model() -> nn.Module:
    decoder = Decoder(CONFIG)
    for layer in decoder.layers.values():
        layer.moe.router = OriginalRouter(CONFIG)
    return decoder


def batch(model: nn.Module) -> tuple[Tensor, Tensor]:
    return make_batch(CONFIG)


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def parallelize(model: Decoder, mesh: DeviceMesh) -> nn.Module:
    for layer in model.layers.values():
        moe = layer.moe
        moe.router = PortedRouter(moe.router.gate, CONFIG.top_k, is_normalized=not BUGGY)  # BUG
        distribute_experts(moe.experts, mesh.get_group("ep"))
    return model


def average_gradients(model: nn.Module, mesh: DeviceMesh) -> None:
    """The mean over data ranks; those of experts have been summed by the tokens' way back."""
    for name, parameter in model.named_parameters():
        if "experts" not in name:
            dist.all_reduce(parameter.grad, group=mesh.get_group("ep"))
        parameter.grad /= mesh.size()


def train_step(model, batch, optimizer, mesh=None):
    tokens, labels = batch
    optimizer.zero_grad()
    loss = cross_entropy(model(tokens), labels)
    loss.backward()
    loss = loss.detach()
    if mesh is not None:
        average_gradients(model, mesh)
        dist.all_reduce(loss, group=mesh.get_group("ep"))
        loss /= mesh.size()
    optimizer.step()
    return loss
