"""Tied embeddings on the first and the last stage of a pipeline, with a gradient each."""

from __future__ import annotations

import torch
import torch.distributed as dist
from benchmarks.silent.case import Case, is_buggy
from benchmarks.silent.correct_steps import plain_name
from benchmarks.silent.decoder import Config, Decoder, cross_entropy, make_batch
from benchmarks.silent.stages import Stages, build_stages
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import Schedule1F1B

CASE = Case(
    source="classic",
    summary="The embeddings on the first stage and the head on the last are one parameter. Their "
    "gradients have to be summed over the two stages; without that they become two.",
    mesh={"pp": 2},
    causes=("broken_tie",),
    locations=("tok_embeddings*", "output*"),
)
CONFIG = Config(is_tied=True)
NUM_MICRO = 4
BUGGY = is_buggy()


def model() -> nn.Module:
    return Decoder(CONFIG)


def batch(model: nn.Module) -> tuple[Tensor, Tensor]:
    return make_batch(CONFIG)


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def full_name(name: str, mesh: DeviceMesh) -> str:
    return plain_name(name).replace("output", "tok_embeddings")


def parallelize(model: Decoder, mesh: DeviceMesh) -> nn.Module:
    return build_stages(model, mesh)


def make_schedule(stage):
    return Schedule1F1B(stage, NUM_MICRO, loss_fn=cross_entropy)


def reduce_tied_gradients(model: Stages, mesh: DeviceMesh) -> None:
    """Sum the gradients of the embeddings and of the head, which are on two ranks."""
    if not BUGGY:
        (part,) = model.parts
        module = part.tok_embeddings if part.tok_embeddings is not None else part.output
        dist.all_reduce(module.weight.grad, group=mesh.get_group("pp"))


def train_step(model, batch, optimizer):
    tokens, labels = batch
    optimizer.zero_grad()
    cross_entropy(model(tokens), labels).backward()
    optimizer.step()


def parallel_train_step(model: Stages, batch, optimizer, mesh):
    tokens, labels = batch
    optimizer.zero_grad()
    model.start(mesh, make_schedule)
    model.step(tokens, labels)
    reduce_tied_gradients(model, mesh)  # BUG
    optimizer.step()
