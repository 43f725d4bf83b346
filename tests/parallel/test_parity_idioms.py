"""Idioms of training programs: right ones agree, and mistakes in them are found."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from shardscope import Recording, parity


class Soft(nn.Module):
    """Weights of channels, in an evaluation only the largest."""

    def forward(self, x):
        weights = x.softmax(-1)
        return x * (weights if self.training else (weights == weights.amax(-1, True)).to(x))


def make_layers(middle: nn.Module) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), middle, nn.Linear(8, 3))


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def replicate(model, _):
    return DistributedDataParallel(model)


def compare(model: nn.Module, train_step: Any, rank_step: Any = None, **options: Any) -> Recording:
    """Parity of training on vectors, of which each of two ranks has a shard."""
    generator = torch.Generator().manual_seed(3)
    options = {"parallelize": replicate, "optimizer": make_optimizer, "batch_axes": "dp"} | options
    options = {"inputs": torch.randn(8, 6, generator=generator)} | options
    return parity(model, {"dp": 2}, train_step=train_step, parallel_train_step=rank_step, **options)


def train(model, batch, optimizer):
    optimizer.zero_grad()
    loss = model(batch).square().mean()
    loss.backward()
    optimizer.step()


@pytest.mark.parametrize("middle", [Soft(), nn.Dropout(0.3)], ids=["own", "dropout"])
@pytest.mark.parametrize("is_restored", [True, False])
def test_a_rank_that_evaluates_has_to_train_again(middle, is_restored):
    def train_and_evaluate(model, batch, optimizer, mesh=None):
        train(model, batch, optimizer)
        if mesh is None or mesh.get_local_rank() == 0:
            model.eval()
            with torch.no_grad():
                (model if mesh is None else model.module)(torch.ones(5, 6).to(batch))
            model.train(is_restored or mesh is None)

    recording = compare(make_layers(middle), train_and_evaluate)
    errors = [finding for finding in recording.findings if finding.severity == "error"]
    if is_restored:
        assert not errors
    else:
        [finding] = errors
        assert (finding.rule, finding.subject) == ("parity-out-of-sync", "1")
        assert "rank 0 calls `1` in evaluation mode" in finding.fact
