"""Gradients of a functional backward that are written back once for each name of a parameter."""

from __future__ import annotations

import torch
import torch.distributed as dist
from benchmarks.silent.case import Case, is_buggy
from benchmarks.silent.decoder import Config, Decoder, cross_entropy, make_batch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

CASE = Case(
    source="torchtitan 2b935fa3c",
    summary="A step that computes forward and backward as one function adds the gradients that it "
    "returns to those of the parameters. A tied weight has two names and gets the full gradient "
    "for each of them, twice in all. The loss of the first step is right.",
    mesh={"dp": 4},
    causes=("scaled", "broken_tie"),
    locations=("tok_embeddings", "output", "tok_embeddings.weight", "output.weight"),
    batch_axes=("dp",),
)
CONFIG = Config(is_tied=True)
BUGGY = is_buggy()


def model() -> nn.Module:
    return Decoder(CONFIG)


def batch(model: nn.Module) -> tuple[Tensor, Tensor]:
    return make_batch(CONFIG)


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def train_step(model, batch, optimizer):
    tokens, labels = batch
    optimizer.zero_grad()
    loss = cross_entropy(model(tokens), labels)
    loss.backward()
    optimizer.step()
    return loss.detach()


class ForwardBackward:
    """Computes the loss and the gradients of all parameters by their names, as a graph does."""

    def __init__(self, model: nn.Module, mesh: DeviceMesh) -> None:
        self.model, self.group = model, mesh.get_group("dp")
        self.parameters = dict(model.named_parameters(remove_duplicate=False))

    def compute(self, tokens: Tensor, labels: Tensor) -> tuple[Tensor, list[Tensor]]:
        logits = torch.func.functional_call(
            self.model, self.parameters, (tokens,), tie_weights=False
        )
        loss = cross_entropy(logits, labels)
        gradients = torch.autograd.grad(loss, list(self.parameters.values()))
        loss = loss.detach()
        for value in (loss, *gradients):
            dist.all_reduce(value, group=self.group)
            value /= dist.get_world_size(self.group)
        return loss, list(gradients)

    def accumulate(self, gradients: list[Tensor]) -> None:
        """Add gradients to those of the parameters."""
        written: set[nn.Parameter] = set()
        for parameter, gradient in zip(self.parameters.values(), gradients, strict=True):
            if not BUGGY and parameter in written:
                continue
            written.add(parameter)
            if parameter.grad is None:
                parameter.grad = gradient
            else:
                parameter.grad = parameter.grad + gradient  # BUG


def parallel_train_step(model, batch, optimizer, mesh):
    optimizer.zero_grad()
    graph = ForwardBackward(model, mesh)
    loss, gradients = graph.compute(*batch)
    graph.accumulate(gradients)
    optimizer.step()
    return loss
