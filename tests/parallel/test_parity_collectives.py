"""Training steps with collectives of their own: which line is blamed, and what is right."""

import linecache

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from shardscope import parity

WIDTH = 8
X, Y = torch.randn(6, WIDTH), torch.randn(6, WIDTH)


class Pair(nn.Module):
    def __init__(self, *, has_bias=True):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH, bias=has_bias)

    def forward(self, x):
        return self.down(self.up(x).relu())


class Rows(nn.Module):
    """A row-wise layer by hand, which multiplies the sum by a factor before it adds the bias."""

    def __init__(self, layer, mesh, factor):
        super().__init__()
        weight = layer.weight.detach().chunk(mesh.size(), 1)[mesh.get_local_rank()]
        self.weight, self.bias = nn.Parameter(weight.clone()), layer.bias
        self.group, self.rank, self.factor = mesh.get_group(), mesh.get_local_rank(), factor

    def forward(self, x):
        y = x.chunk(dist.get_world_size(self.group), -1)[self.rank] @ self.weight.T
        dist.all_reduce(y, group=self.group)
        return y * self.factor if self.bias is None else y * self.factor + self.bias


def make_optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def train(model, batch, optimizer, mesh=None, *, reduce=None, clip=None):
    x, y = batch
    optimizer.zero_grad()
    loss = (model(x) - y).square().mean()
    loss.backward()
    for parameter in model.parameters():
        if mesh is not None and reduce is not None:
            reduce(parameter.grad, mesh.size())
        if clip is not None:
            parameter.grad.clamp_(-clip, clip)
    optimizer.step()
    return loss.detach()


def compare(step=train, parallel_step=None, *, has_bias=True, **options):
    options = {"optimizer": make_optimizer, "batch_axes": "dp", "inputs": (X, Y)} | options
    torch.manual_seed(0)
    return parity(
        Pair(has_bias=has_bias),
        {"dp": 2},
        train_step=step,
        parallel_train_step=parallel_step,
        **options,
    )


def read_line(finding):
    return linecache.getline(__file__, finding.source.line).strip()


def test_gradients_that_are_summed_by_hand_are_blamed_with_the_line_of_the_sum():
    def add(gradient, size):
        dist.all_reduce(gradient)

    def step(model, batch, optimizer, mesh=None):
        return train(model, batch, optimizer, mesh, reduce=add)

    [finding] = compare(parallel_step=step).findings
    assert (finding.rule, finding.subject) == ("parity-double-reduction", "all gradients")
    assert read_line(finding) == "dist.all_reduce(gradient)"


def scale_rows(model, mesh):
    model.down = Rows(model.down, mesh["dp"], 3.0)


def test_a_factor_is_found_behind_the_bias_that_is_added_after_it():
    [finding] = compare(parallelize=scale_rows, batch_axes=()).findings
    assert (finding.rule, finding.subject) == ("parity-scaled", "down")
    assert "Apart from the bias it is 3 times what it should be" in finding.fact


def test_a_sum_that_is_scaled_is_blamed_with_the_line_of_the_sum():
    [finding] = compare(parallelize=scale_rows, batch_axes=(), has_bias=False).findings
    assert (finding.rule, finding.subject) == ("parity-scaled", "down")
    assert read_line(finding) == "dist.all_reduce(y, group=self.group)"


def test_an_optimizer_that_steps_later_does_not_change_which_gradients_another_one_used():
    def make(model):
        return [make_optimizer(model.up), make_optimizer(model.down)]

    def step(model, batch, optimizers, mesh=None):
        x, y = batch
        for part, optimizer in zip((model.up, model.down), optimizers, strict=True):
            optimizer.zero_grad()
            (model(x) - y).square().mean().backward()
            for parameter in part.parameters() if mesh is not None else ():
                dist.all_reduce(parameter.grad, op=dist.ReduceOp.AVG)
            optimizer.step()

    assert not compare(step, optimizer=make).findings


def test_an_evaluation_after_a_wrong_update_is_not_blamed():
    def step(model, batch, optimizer, mesh=None):
        loss = train(
            model, batch, optimizer, mesh, reduce=dist.all_reduce if mesh is None else None
        )
        with torch.no_grad():
            model(batch[0])
        return loss

    [finding] = compare(step).findings
    assert (finding.rule, finding.subject) == ("parity-missing-reduction", "all gradients")


class OwnUpdates:
    """Reduces copies of gradients, as optimizers of flat shards do, and updates with them."""

    def __init__(self, model):
        self.parameters = list(model.parameters())

    @torch.no_grad()
    def step(self, mesh, *, is_reduced=True):
        for parameter in self.parameters:
            gradient = parameter.grad.clone()
            if mesh is not None and is_reduced:
                dist.all_reduce(gradient, op=dist.ReduceOp.AVG)
            parameter.sub_(gradient, alpha=0.1)


@pytest.mark.parametrize("is_reduced", [True, False])
def test_gradients_may_be_reduced_elsewhere_if_all_updates_agree(is_reduced):
    def step(model, batch, optimizer, mesh=None):
        model.zero_grad()
        (model(batch[0]) - batch[1]).square().mean().backward()
        optimizer.step(mesh, is_reduced=is_reduced)

    rules = [finding.rule for finding in compare(step, optimizer=OwnUpdates).findings]
    assert rules == ([] if is_reduced else ["parity-missing-reduction"])


def test_clipping_that_changes_the_shard_of_one_rank_only_is_right():
    def step(model, batch, optimizer, mesh=None):
        loss = (model(batch[0]) - batch[1]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        largest = max(float(_full(p.grad).abs().max()) for p in model.parameters())
        nn.utils.clip_grad_value_(model.parameters(), 0.99 * largest)
        optimizer.step()

    recording = compare(step, parallelize=lambda model, mesh: fully_shard(model, mesh=mesh["dp"]))
    assert not recording.findings


def _full(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
