"""Gradient accumulation with a pipeline schedule that scales the gradients after every step."""

from __future__ import annotations

import torch
import torch.distributed as dist
from benchmarks.silent.case import Case, is_buggy
from benchmarks.silent.decoder import Config, Decoder, cross_entropy, make_batch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

CASE = Case(
    source="torchtitan 3e1b843ec",
    summary="A pipeline schedule divides the gradients by the number of its micro-batches at the "
    "end of each step. With gradient accumulation the gradients of earlier steps are divided "
    "again and again. The losses are right; the gradient norm is too small.",
    mesh={"pp": 2},
    causes=("scaled",),
    locations=("all gradients",),
)
CONFIG = Config(num_layers=2)
NUM_ACCUMULATED = 2
NUM_MICROBATCHES = 2
BUGGY = is_buggy()


def model() -> nn.Module:
    return Decoder(CONFIG)


def batch(model: nn.Module) -> tuple[Tensor, Tensor]:
    return make_batch(CONFIG)


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def train_step(model, batch, optimizer):
    optimizer.zero_grad()
    total = torch.zeros(())
    for tokens, labels in zip(*(x.chunk(NUM_ACCUMULATED) for x in batch), strict=True):
        loss = cross_entropy(model(tokens), labels) / NUM_ACCUMULATED
        loss.backward()
        total = total + loss.detach()
    nn.utils.clip_grad_norm_(model.parameters(), 100.0)
    optimizer.step()
    return total


class Stage(Decoder):
    """The layers of one rank; the first has the embedding, the last the output."""

    def __init__(self, model: Decoder, rank: int, size: int) -> None:
        nn.Module.__init__(self)
        keys = list(model.layers)
        per_rank = len(keys) // size
        own = keys[rank * per_rank : (rank + 1) * per_rank]
        self.tok_embeddings = model.tok_embeddings if rank == 0 else None
        self.layers = nn.ModuleDict({key: model.layers[key] for key in own})
        self.norm = model.norm if rank == size - 1 else None
        self.output = model.output if rank == size - 1 else None

    def forward(self, x: Tensor) -> Tensor:
        positions = torch.arange(x.shape[1])
        mask = positions[:, None] >= positions[None, :]
        if self.tok_embeddings is not None:
            x = self.tok_embeddings(x)
        for layer in self.layers.values():
            x = layer(x, positions, mask)
        return x if self.output is None else self.output(self.norm(x))


def parallelize(model: Decoder, mesh: DeviceMesh) -> nn.Module:
    return Stage(model, mesh.get_local_rank("pp"), mesh["pp"].size())


def build_schedule(model: Stage, mesh: DeviceMesh) -> Schedule1F1B:
    """The schedule, whose loss is part of the mean over all micro-batches."""
    rank, size = mesh.get_local_rank("pp"), mesh["pp"].size()
    stage = PipelineStage(model, rank, size, torch.device("cpu"), group=mesh.get_group("pp"))
    if BUGGY:
        divisor = NUM_ACCUMULATED

        def loss_fn(logits: Tensor, labels: Tensor) -> Tensor:
            return cross_entropy(logits, labels) / divisor

        return Schedule1F1B(stage, NUM_MICROBATCHES, loss_fn=loss_fn)  # BUG

    def rescaled_loss(logits: Tensor, labels: Tensor) -> Tensor:
        return cross_entropy(logits, labels) / (NUM_ACCUMULATED * NUM_MICROBATCHES)

    return Schedule1F1B(stage, NUM_MICROBATCHES, loss_fn=rescaled_loss, scale_grads=False)


def forward_backward(schedule: Schedule1F1B, tokens: Tensor, labels: Tensor, rank: int) -> Tensor:
    """Run all micro-batches; their loss on the last rank, elsewhere zero."""
    losses: list[Tensor] = []
    if rank == 0:
        schedule.step(tokens)
    else:
        schedule.step(target=labels, losses=losses)
    if not losses:
        return torch.zeros(())
    total = torch.stack(losses).detach()
    return total.mean() if BUGGY else total.sum()


def parallel_train_step(model, batch, optimizer, mesh):
    if not hasattr(optimizer, "schedule"):
        optimizer.schedule = build_schedule(model, mesh)
    optimizer.zero_grad()
    total = torch.zeros(())
    rank = mesh.get_local_rank("pp")
    for tokens, labels in zip(*(x.chunk(NUM_ACCUMULATED) for x in batch), strict=True):
        total = total + forward_backward(optimizer.schedule, tokens, labels, rank)
    dist.all_reduce(total, group=mesh.get_group("pp"))
    clip_grad_norm(model, 100.0, mesh)
    optimizer.step()
    return total


def clip_grad_norm(model: nn.Module, max_norm: float, mesh: DeviceMesh) -> None:
    """Clip by the norm over all stages."""
    parameters = list(model.parameters())
    norm = nn.utils.get_total_norm([p.grad for p in parameters]) ** 2
    dist.all_reduce(norm, group=mesh.get_group("pp"))
    nn.utils.clip_grads_with_norm_(parameters, max_norm, norm.sqrt())
