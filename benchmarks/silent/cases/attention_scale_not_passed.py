"""A kernel for context parallelism that is called without the model's own scale."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F  # noqa: N812
from benchmarks.silent.case import Case, is_buggy
from benchmarks.silent.correct_by_hand import Gather, all_gather
from benchmarks.silent.decoder import (
    Attention,
    Config,
    Decoder,
    InnerAttention,
    cross_entropy,
    make_batch,
    rotate,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

CASE = Case(
    source="torchtitan 29aafb91b",
    summary="The wrapper around the fused kernel drops the scale of the attention scores, and the "
    "kernel takes one over the root of the head dim. That is right for most models, but not for "
    "one that is extended to long sequences.",
    mesh={"cp": 2},
    causes=("scaled",),
    locations=("layers.*.attention.inner_attention", "layers.*.attention"),
)
CONFIG = Config()
EXTENSION = 8.0  # of the length that the model was trained for at first
BUGGY = is_buggy()


class ExtendedAttention(Attention):
    """Attention whose scores are larger, for sequences longer than those of pretraining."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.scale = self.head_dim**-0.5 * (0.1 * math.log(EXTENSION) + 1) ** 2

    def forward(self, x: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        q = self.wq(x).unflatten(-1, (-1, self.head_dim))
        k = self.wk(x).unflatten(-1, (-1, self.head_dim))
        v = self.wv(x).unflatten(-1, (-1, self.head_dim))
        q, k = rotate(q, positions), rotate(k, positions)
        return self.wo(self.inner_attention(q, k, v, mask, self.scale).flatten(-2))


class FusedAttention(InnerAttention):
    """Attention of this rank's queries to all keys, in a fused kernel."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.group = mesh.get_group()

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
        k, v = (Gather.apply(x.contiguous(), 1, self.group) for x in (k, v))
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        options = {} if BUGGY else {"scale": scale}
        y = F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True, **options)  # BUG
        return y.transpose(1, 2)


def model() -> nn.Module:
    decoder = Decoder(CONFIG)
    for layer in decoder.layers.values():
        layer.attention = ExtendedAttention(CONFIG)
    return decoder


def batch(model: nn.Module) -> tuple[Tensor, Tensor]:
    return make_batch(CONFIG, 4)


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def parallelize(model: Decoder, mesh: DeviceMesh) -> nn.Module:
    for layer in model.layers.values():
        layer.attention.inner_attention = FusedAttention(mesh["cp"])
        fully_shard(layer, mesh=mesh["cp"])
    return fully_shard(model, mesh=mesh["cp"])


def train_step(model, batch, optimizer):
    tokens, labels = batch
    optimizer.zero_grad()
    loss = cross_entropy(model(tokens), labels)
    loss.backward()
    optimizer.step()
    return loss.detach()


def parallel_train_step(model, batch, optimizer, mesh):
    rank, size, group = mesh.get_local_rank("cp"), mesh.size(), mesh.get_group("cp")
    tokens, labels = (x.chunk(size, 1)[rank] for x in batch)
    positions = torch.arange(batch[0].shape[1]).chunk(size)[rank]
    mask = positions[:, None] >= all_gather(positions, 0, group)[None, :]
    optimizer.zero_grad()
    loss = cross_entropy(model(tokens, positions, mask), labels)
    loss.backward()
    optimizer.step()
    return all_gather(loss.detach()[None], 0, group).mean()
