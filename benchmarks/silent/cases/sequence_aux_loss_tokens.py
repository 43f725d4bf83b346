"""A loss that is averaged over sequences, and then multiplied by the tokens of one sequence."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from benchmarks.silent.case import Case, is_buggy
from benchmarks.silent.decoder import Config, Decoder, MoE, Router, cross_entropy, make_batch
from benchmarks.silent.decoder_by_hand import AttachedLoss, reduce_gradients
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

CASE = Case(
    source="Megatron-LM pull request 5798",
    summary="The loss that balances experts within each sequence is a mean over the sequences of "
    "a micro-batch, and has to be weighted by the tokens of the micro-batch where losses are "
    "divided by all tokens in the end. It was weighted by the tokens of one sequence: its "
    "gradient depends on the size of a micro-batch.",
    mesh={"dp": 2},
    causes=("scaled", "double_reduction"),
    locations=("layers.*.moe.router", "layers.*.moe.router.gate", "layers.*.moe"),
    batch_axes=("dp",),
)
CONFIG = Config(num_experts=4, top_k=2)
COEFFICIENT = 0.1
NUM_MICRO = 2
BUGGY = is_buggy()


class SequenceRouter(Router):
    """A router with a loss for each sequence."""

    length = CONFIG.length

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.gate(x).softmax(-1)
        weights, chosen = scores.topk(self.top_k, -1)
        num_experts = scores.shape[-1]
        hits = F.one_hot(chosen, num_experts).sum(1).view(-1, self.length, num_experts)
        loads = hits.sum(1) * num_experts / (self.length * self.top_k)
        means = scores.view(-1, self.length, num_experts).mean(1)
        loss = COEFFICIENT * (loads * means).sum(-1).mean()
        num_tokens = self.length if BUGGY else len(x)
        return AttachedLoss.apply(weights, loss * num_tokens), chosen  # BUG


def model() -> nn.Module:
    decoder = Decoder(CONFIG)
    for module in decoder.modules():
        if isinstance(module, MoE):
            module.router = SequenceRouter(CONFIG)
    return decoder


def batch(model: nn.Module) -> tuple[Tensor, Tensor]:
    return make_batch(CONFIG)


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def train_step(model, batch, optimizer, mesh: DeviceMesh | None = None):
    """Micro-batches on the ranks, and the entire batch on the single device."""
    num_micro = 1 if mesh is None else NUM_MICRO
    num_tokens = torch.tensor(batch[1].numel())
    if mesh is not None:
        dist.all_reduce(num_tokens, group=mesh.get_group("dp"))
    optimizer.zero_grad()
    AttachedLoss.scale = 1 / num_tokens.item()
    total = torch.zeros(())
    for tokens, labels in zip(*(x.chunk(num_micro) for x in batch), strict=True):
        loss = cross_entropy(model(tokens), labels, reduction="sum") / num_tokens
        loss.backward()
        total += loss.detach()
    if mesh is not None:
        reduce_gradients(model, mesh.get_group("dp"))
        dist.all_reduce(total, group=mesh.get_group("dp"))
    optimizer.step()
    return total
