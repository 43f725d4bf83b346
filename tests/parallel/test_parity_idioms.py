"""Idioms of training programs: right ones agree, and mistakes in them are found."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.func import functional_call, grad, vmap
from torch.nn.functional import linear, pad
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from parity_models import Copy
from shardscope import Recording, parity
from shardscope.record import TensorKind


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


@pytest.mark.parametrize("is_kept", [True, False])
def test_a_recomputation_that_draws_other_numbers_is_found(is_kept):
    def recompute(model, mesh):
        forward = model[1].forward

        def checkpointed(x):
            return checkpoint(forward, x, use_reentrant=False, preserve_rng_state=is_kept)

        model[1].forward = checkpointed

    middle = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.4), nn.Tanh())
    recording = compare(make_layers(middle), train, parallelize=recompute, batch_axes=())
    if is_kept:
        assert not recording.findings
    else:
        [finding] = recording.findings
        assert (finding.rule, finding.subject) == ("parity-randomness", "1.1")


def test_numbers_of_a_seeded_generator_are_no_excuse_for_a_difference():
    def evaluate(model, batch, optimizer, mesh=None):
        train(model, batch, optimizer)
        x = torch.randn(7, 6, generator=torch.Generator().manual_seed(5)).to(batch)
        x = x if mesh is None else x[[1, 0, 2, 3, 4, 5, 6]]
        with torch.no_grad():
            return (model(x).sum(1) * torch.arange(7)).sum().item()

    recording = compare(make_layers(nn.Tanh()), evaluate)
    assert {finding.severity for finding in recording.findings} == {"error"}


def test_samples_that_torch_func_maps_over_are_a_gap():
    def train_each(model, batch, optimizer, mesh=None):
        parameters = dict(model.named_parameters())

        def loss_of(parameters, x):
            return functional_call(model, parameters, (x[None],)).square().mean()

        gradients = vmap(grad(loss_of), (None, 0))(parameters, batch)
        optimizer.zero_grad()
        for name, parameter in parameters.items():
            parameter.grad = gradients[name].mean(0)
            if mesh is not None:
                dist.all_reduce(parameter.grad, op=dist.ReduceOp.AVG)
        optimizer.step()

    options = {"parallelize": lambda model, mesh: model}
    recording = compare(make_layers(nn.Tanh()), train_each, **options)
    assert not recording.findings
    assert "outputs" in {gap.place for gap in recording.gaps}


def update_in_backward(model):
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}

    def update(parameter):
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(update)
    return list(optimizers.values())


def test_gradients_are_compared_that_are_freed_in_backward():
    def step(model, batch, _):
        model(batch).square().mean().backward()

    def shard(model, mesh):
        return fully_shard(model, mesh=mesh)

    options = {"parallelize": shard, "optimizer": update_in_backward}
    recording = compare(make_layers(nn.Tanh()), step, **options)
    assert not recording.findings
    gradients = [t for t in recording.parity[0].tensors if t.kind is TensorKind.GRADIENT]
    assert len(gradients) == 2 * 4


class Padded(nn.Module):
    """A head whose 3 outputs are padded to 4, so that two ranks can share them."""

    def __init__(self, head, mesh):
        super().__init__()
        self.group, rank = mesh.get_group(), mesh.get_local_rank()
        self.weight = nn.Parameter(pad(head.weight.detach(), (0, 0, 0, 1)).chunk(2)[rank].clone())

    def forward(self, x):
        return linear(Copy.apply(x, self.group), self.weight)


def test_logits_and_weights_with_padding_agree():
    def parallelize(model, mesh):
        model[2] = Padded(model[2], mesh)

    def step(model, batch, optimizer, mesh=None):
        optimizer.zero_grad()
        logits = model(batch)
        if mesh is not None and mesh.get_local_rank() == 1:
            logits = logits[:, :1]
        (logits + 1).square().sum().backward()
        optimizer.step()

    model = make_layers(nn.Tanh())
    model[2] = nn.Linear(8, 3, bias=False)
    recording = compare(model, step, parallelize=parallelize, batch_axes=())
    assert not recording.findings
    assert "" in {t.name for t in recording.parity[0].tensors if t.kind is TensorKind.OUTPUT}


@pytest.mark.parametrize("is_reduced", [True, False])
def test_schedulers_of_all_ranks_decide_by_the_same_number(is_reduced):
    """Also before the learning rates differ."""

    def make_both(model):
        optimizer = make_optimizer(model)
        return optimizer, torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=9)

    def step(model, batch, both, mesh=None):
        optimizer, scheduler = both
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        metric = loss.detach().clone()
        if mesh is not None and is_reduced:
            dist.all_reduce(metric)  # a sum, which decides as the mean does
        scheduler.step(metric)

    recording = compare(make_layers(nn.Tanh()), step, optimizer=make_both)
    if is_reduced:
        assert not recording.findings
    else:
        [finding] = recording.findings
        assert finding.rule == "parity-out-of-sync"
        assert "metric of ReduceLROnPlateau is" in finding.fact


def test_numbers_that_are_read_on_one_line_are_compared_apart():
    def step(model, batch, optimizer, mesh=None):
        train(model, batch, optimizer)
        loss = model(batch).square().mean().detach()
        if mesh is not None:
            dist.all_reduce(loss)
        print(loss.item() / (1 if mesh is None else mesh.size()), torch.ones(()).item())

    recording = compare(make_layers(nn.Tanh()), step)
    assert not recording.findings
    reported = {t.name for t in recording.parity[0].tensors if t.kind is TensorKind.REPORTED}
    assert any(name.endswith(" (2)") for name in reported)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_that_are_rounded_before_they_are_reduced_are_a_warning(dtype):
    def step(model, batch, optimizer, mesh=None):
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        for parameter in model.parameters() if mesh is not None else ():
            gradient = parameter.grad.to(dtype)
            dist.all_reduce(gradient, op=dist.ReduceOp.AVG)
            parameter.grad = gradient.to(parameter)
        optimizer.step()

    def make_sgd(model):
        return torch.optim.SGD(model.parameters(), lr=0.1)

    options = {"parallelize": lambda model, mesh: model, "optimizer": make_sgd}
    recording = compare(make_layers(nn.Tanh()), step, **options)
    warnings = [finding for finding in recording.findings if finding.severity == "warning"]
    assert [finding.rule for finding in warnings] == ["parity-rounding"] * (dtype.itemsize == 2)
