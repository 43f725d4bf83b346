"""Runs with perturbed rounding change what is rounded, and nothing else."""

from __future__ import annotations

import pytest
import torch

from shardscope.numerics import RandomRounding, convert_model_to_fp64, fp64_mode
from verdict_cases import numbers


def differs(function, *inputs, seed=1) -> bool:
    plain = function(*inputs)
    with RandomRounding(seed):
        return not torch.equal(function(*inputs), plain)


X = numbers(30, 30)
DOUBLE = X.double()


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.max(0).values,
        lambda x: x.relu().t().contiguous()[3:],
        lambda x: x == x.max(),
        lambda x: (x > 0).float().sum(),
        lambda x: torch.arange(9.0).sum() + x.numel(),
        lambda x: x.clone().zero_(),
        lambda x: x * 2,
        lambda x: x.round().floor(),
        lambda x: x.argsort(),
        lambda x: torch.cat([-DOUBLE.clone(), DOUBLE.relu()]),
        lambda x: torch.nn.functional.embedding(torch.arange(3), x),
    ],
    ids=[
        "max",
        "moves",
        "equal",
        "count",
        "whole",
        "zero",
        "twice",
        "round",
        "sort",
        "double",
        "rows",
    ],
)
def test_what_is_exact_stays(function):
    assert not differs(function, X)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x / 3,
        lambda x: x @ x,
        lambda x: x.sum(),
        lambda x: x.clone().mul_(0.3),
        lambda x: torch.softmax(x, -1),
        lambda x: x.bfloat16(),
        lambda x: torch.var_mean(x)[1],
        lambda x: x.double() / 3,
    ],
    ids=["division", "matmul", "sum", "in place", "softmax", "cast", "several", "double"],
)
def test_what_is_rounded_moves_by_little(function):
    assert differs(function, X)
    plain = function(X)
    with RandomRounding(1):
        perturbed = function(X)
    assert perturbed.dtype == plain.dtype
    scale = torch.finfo(plain.dtype).eps * float((X.abs() @ X.abs()).max())
    assert float((perturbed - plain).abs().max()) < 8 * scale


def test_the_same_seed_rounds_the_same_and_another_otherwise():
    runs = []
    for seed in (1, 1, 2):
        with RandomRounding(seed):
            runs.append(X / 3)
    assert torch.equal(runs[0], runs[1])
    assert not torch.equal(runs[0], runs[2])


def test_what_the_program_draws_is_left_alone():
    torch.manual_seed(3)
    plain = torch.rand(5)
    torch.manual_seed(3)
    with RandomRounding(1):
        _ = X / 3
        assert torch.equal(torch.rand(5), plain)


def test_running_statistics_in_double_precision_are_updated_once():
    norm = torch.nn.BatchNorm1d(4).double()
    perturbed = torch.nn.BatchNorm1d(4).double()
    x = numbers(8, 4).double()
    norm(x)
    with RandomRounding(1):
        perturbed(x)
    torch.testing.assert_close(perturbed.running_mean, norm.running_mean, rtol=1e-12, atol=1e-12)


def test_integers_that_are_drawn_stay_the_same_integers_in_double_precision():
    torch.manual_seed(3)
    plain = torch.randperm(7), torch.randint(9, (5,))
    torch.manual_seed(3)
    with fp64_mode(torch.float32):
        drawn = torch.randperm(7), torch.randint(9, (5,))
    assert all(map(torch.equal, plain, drawn))
    assert drawn[0].dtype is torch.int64


def test_a_model_in_double_precision_keeps_its_objects_and_what_they_share():
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(2, 3))
    model[1].weight = model[0].weight
    model.followed = [*model.parameters()]
    model.flat = numbers(6)
    model.views = {"middle": model.flat[2:5]}
    convert_model_to_fp64(model)
    assert model.followed[0] is model[0].weight is model[1].weight
    assert isinstance(model[0].weight, torch.nn.Parameter)
    tensors = [*model.parameters(), model.flat, model.views["middle"]]
    assert {tensor.dtype for tensor in tensors} == {torch.float64}
    model.flat[3] = 9
    assert model.views["middle"][1] == 9
