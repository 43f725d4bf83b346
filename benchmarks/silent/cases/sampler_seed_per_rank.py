"""Ranks that take every second sample of a shuffled batch, each of another order."""

from __future__ import annotations

import torch
import torch.distributed as dist
from benchmarks.silent.case import Case, is_buggy
from benchmarks.silent.decoder import Config, Decoder, cross_entropy, make_batch
from benchmarks.silent.decoder_by_hand import reduce_gradients
from torch import Tensor, nn

CASE = Case(
    source="TrainCheck stackoverflow-67180955 (of its class)",
    summary="Workers that load data have seeds that do not fit each other. In the original they "
    "draw the same numbers; here each rank shuffles the samples with a seed of its own, and takes "
    "those that are its turn: some samples are used twice and others never.",
    mesh={"dp": 2},
    causes=("wrong_slice", "randomness"),
    locations=("the inputs of the model",),
)
CONFIG = Config()
BUGGY = is_buggy()


class Sampler:
    """Yields the samples of a rank, in an order that depends on the seed."""

    def __init__(self, rank: int, size: int, seed: int) -> None:
        self.rank, self.size = rank, size
        self.generator = torch.Generator().manual_seed(seed)

    def take(self, samples: Tensor) -> Tensor:
        order = torch.randperm(len(samples), generator=self.generator)
        return samples[order[self.rank :: self.size]]


def model() -> nn.Module:
    return Decoder(CONFIG)


def batch(model: nn.Module) -> tuple[Tensor, Tensor]:
    return make_batch(CONFIG)


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def train_step(model, batch, optimizer):
    tokens, labels = batch
    optimizer.zero_grad()
    loss = cross_entropy(model(tokens), labels)
    loss.backward()
    optimizer.step()
    return loss.detach()


def parallel_train_step(model, batch, optimizer, mesh):
    rank, group = mesh.get_local_rank("dp"), mesh.get_group("dp")
    sampler = Sampler(rank, mesh.size(), seed=17 + rank if BUGGY else 17)  # BUG
    samples = sampler.take(torch.stack(batch, 1))
    tokens, labels = samples.unbind(1)
    optimizer.zero_grad()
    loss = cross_entropy(model(tokens), labels)
    loss.backward()
    reduce_gradients(model, group, dist.ReduceOp.AVG)
    optimizer.step()
    loss = loss.detach()
    dist.all_reduce(loss, op=dist.ReduceOp.AVG, group=group)
    return loss
