"""Loss scaling for half precision whose ranks decide alone whether to skip the step."""

from __future__ import annotations

import torch
import torch.distributed as dist
from benchmarks.silent.case import Case, is_buggy
from benchmarks.silent.decoder import Config, Decoder, cross_entropy, make_batch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

CASE = Case(
    source="classic",
    summary="Gradients are checked for values that overflow in float16. Of shards that happens on "
    "one rank, which skips its step and halves its scale alone, as with a GradScaler that does "
    "not know of FSDP.",
    mesh={"dp": 2},
    causes=("stale",),
    locations=("layers.*", "tok_embeddings*", "output*"),
    batch_axes=("dp",),
)
CONFIG = Config()
LARGEST = torch.finfo(torch.float16).max
BUGGY = is_buggy()


class Trainer:
    """An optimizer, and the scale of the loss."""

    def __init__(self, model: nn.Module) -> None:
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        self.scale = 2.0**18


def model() -> nn.Module:
    return Decoder(CONFIG)


def batch(model: nn.Module) -> tuple[Tensor, Tensor]:
    """Tokens of few kinds, as in a corpus of code, so that few rows of the embeddings are used."""
    tokens, labels = make_batch(CONFIG)
    return tokens % 4, labels % 4


def optimizer(model: nn.Module) -> Trainer:
    return Trainer(model)


def parallelize(model: Decoder, mesh: DeviceMesh) -> nn.Module:
    for layer in model.layers.values():
        fully_shard(layer, mesh=mesh["dp"])
    return fully_shard(model, mesh=mesh["dp"])


def has_overflow(model: nn.Module, mesh: DeviceMesh | None) -> bool:
    """Whether a gradient is too large for half precision, on any rank."""
    gradients = [
        p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad for p in model.parameters()
    ]
    largest = torch.stack([gradient.abs().max() for gradient in gradients]).max()
    if mesh is not None and not BUGGY:
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=mesh.get_group("dp"))
    return bool(largest > LARGEST)  # BUG


def train_step(model, batch, trainer, mesh=None):
    tokens, labels = batch
    trainer.optimizer.zero_grad()
    (cross_entropy(model(tokens), labels) * trainer.scale).backward()
    if has_overflow(model, mesh):
        trainer.scale /= 2
        return
    for parameter in model.parameters():
        parameter.grad /= trainer.scale
    trainer.optimizer.step()
