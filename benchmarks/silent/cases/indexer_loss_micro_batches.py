"""The loss of a layer's indexer is not divided by the number of micro-batches."""

from __future__ import annotations

from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from benchmarks.silent.case import Case, is_buggy
from benchmarks.silent.decoder import Attention, Config, Decoder, cross_entropy, make_batch
from benchmarks.silent.decoder_by_hand import AttachedLoss
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

CASE = Case(
    source="Megatron-LM pull request 4070",
    summary="Sparse attention has an indexer that learns which keys matter, by a loss whose "
    "gradient starts inside the layer. It is not divided by the number of micro-batches, as the "
    "loss of the model is, so that the indexer's gradient is their sum. The loss is right.",
    mesh={"dp": 2},
    causes=("scaled",),
    locations=(
        "layers.*.attention",  # whose code attaches the loss
        "layers.*.attention.indexer",
        "layers.*.attention.indexer.*",
    ),
    batch_axes=("dp",),
)
CONFIG = Config()
NUM_MICRO = 4
BUGGY = is_buggy()


class Indexer(nn.Module):
    """Scores, for each query, how much each key matters."""

    def __init__(self, dim: int, head_dim: int) -> None:
        super().__init__()
        self.wq = nn.Linear(dim, head_dim, bias=False)
        self.wk = nn.Linear(dim, head_dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.wq(x) @ self.wk(x).transpose(-1, -2)


class IndexedAttention(Attention):
    """Attention with an indexer that learns its weights; in this stage it selects no keys yet."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.indexer = Indexer(config.dim, self.head_dim)

    def forward(self, x: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        output = super().forward(x, positions, mask)
        with torch.no_grad():
            q, k = (layer(x).unflatten(-1, (-1, self.head_dim)) for layer in (self.wq, self.wk))
            k = k.repeat_interleave(q.shape[2] // k.shape[2], 2)
            scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * self.head_dim**-0.5
            weights = scores.masked_fill(~mask, float("-inf")).softmax(-1).mean(1)
        learnt = self.indexer(x.detach()).masked_fill(~mask, float("-inf")).log_softmax(-1)
        loss = F.kl_div(learnt.masked_fill(~mask, 0.0), weights, reduction="none")
        return AttachedLoss.apply(output, loss.masked_fill(~mask, 0.0).sum(-1).mean())


def model() -> nn.Module:
    decoder = Decoder(CONFIG)
    for layer in decoder.layers.values():
        layer.attention = IndexedAttention(CONFIG)
    return decoder


def batch(model: nn.Module) -> tuple[Tensor, Tensor]:
    return make_batch(CONFIG)


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def parallelize(model: Decoder, mesh: DeviceMesh) -> nn.Module:
    return DistributedDataParallel(model, process_group=mesh.get_group("dp"))


def train_step(model, batch, optimizer):
    tokens, labels = batch
    optimizer.zero_grad()
    AttachedLoss.scale = 1.0
    loss = cross_entropy(model(tokens), labels)
    loss.backward()
    optimizer.step()
    return loss.detach()


def parallel_train_step(model, batch, optimizer, mesh):
    optimizer.zero_grad()
    AttachedLoss.scale = 1.0 if BUGGY else 1 / NUM_MICRO  # BUG
    total = torch.zeros(())
    micro_batches = list(zip(*(x.chunk(NUM_MICRO) for x in batch), strict=True))
    for index, (tokens, labels) in enumerate(micro_batches):
        is_last = index == NUM_MICRO - 1
        with nullcontext() if is_last else model.no_sync():
            loss = cross_entropy(model(tokens), labels) / NUM_MICRO
            loss.backward()
        total += loss.detach()
    optimizer.step()
    dist.all_reduce(total, op=dist.ReduceOp.AVG, group=mesh.get_group("dp"))
    return total
