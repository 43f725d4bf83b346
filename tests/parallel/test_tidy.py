"""Tidying a joint program takes ops away, and changes no number."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional

from shardscope.parallel.tidy import own_outputs, tidy

aten = torch.ops.aten
X = torch.randn(4, 6)
CUBE = torch.randn(2, 3, 4)


def traced(function: Callable[..., Any], *args: Tensor) -> fx.GraphModule:
    graph_module = make_fx(function, tracing_mode="fake")(*args)
    assert isinstance(graph_module, fx.GraphModule)
    return graph_module


def tidied(graph_module: fx.GraphModule) -> fx.GraphModule:
    after = copy.deepcopy(graph_module)
    tidy(after.graph)
    after.recompile()
    return after


def ops(graph_module: fx.GraphModule) -> list[str]:
    calls = [node for node in graph_module.graph.nodes if node.op == "call_function"]
    return [str(node.target).removeprefix("aten.") for node in calls]


Twice = tuple[str, Callable[..., Any], list[str]]

CASES: list[Twice] = [
    ("turned twice", lambda x: aten.t(aten.t(x)) + 1, ["add.Tensor"]),
    (
        "transposed there and back",
        lambda x: aten.transpose(aten.transpose(x, 0, 1), 1, 0) + 1,
        ["add.Tensor"],
    ),
    (
        "transposed there and elsewhere",
        lambda x: aten.transpose(aten.transpose(x.view(2, 2, 6), 0, 1), 1, 2) + 1,
        ["view.default", "transpose.int", "transpose.int", "add.Tensor"],
    ),
    ("a view of its own shape", lambda x: x.view(4, 6) + 1, ["add.Tensor"]),
    (
        "a view of views",
        lambda x: x.view(24).view(2, 12).view(8, 3) + 1,
        ["view.default", "add.Tensor"],
    ),
    ("views there and back", lambda x: x.view(24).view(4, 6) + 1, ["add.Tensor"]),
    (
        "one view taken twice",
        lambda x: x.view(24) + x.view(24),
        ["view.default", "add.Tensor"],
    ),
    (
        "one turn taken twice",
        lambda x: (x.t() * 2, x.t() * 3),
        ["t.default", "mul.Tensor", "mul.Tensor"],
    ),
    ("detached", lambda x: x.detach().detach() * 2, ["mul.Tensor"]),
    (
        "a view of another dtype is another value",
        lambda x: x.view(torch.int32) + 1,
        ["view.dtype", "add.Tensor"],
    ),
    (
        "views that differ",
        lambda x: x.view(24)[:8] + x.view(3, 8)[1],
        ["view.default", "slice.Tensor", "view.default", "select.int", "add.Tensor"],
    ),
    (
        "what is computed is computed as often as before",
        lambda x: x.exp() + x.exp(),
        ["exp.default", "exp.default", "add.Tensor"],
    ),
    (
        "a turn of something that is changed in place",
        lambda x: _change(x.clone()),
        [
            "clone.default",
            "t.default",
            "mul.Tensor",
            "add_.Tensor",
            "t.default",
            "mul.Tensor",
            "add.Tensor",
        ],
    ),
]


def _change(x: Tensor) -> Tensor:
    before = x.t() * 2
    x.add_(1)
    return before + x.t() * 3


@pytest.mark.parametrize(("name", "function", "wanted"), CASES, ids=[one[0] for one in CASES])
def test_names_and_views_go_and_numbers_stay(
    name: str, function: Callable[..., Any], wanted: list[str]
) -> None:
    before = traced(function, X)
    after = tidied(before)
    assert ops(after) == wanted
    found, expected = after(X), before(X)
    for one, other in zip(_all(found), _all(expected), strict=True):
        assert torch.equal(one, other)
        assert one.stride() == other.stride()


def test_a_view_of_a_view_of_something_with_gaps_stays_a_view() -> None:
    before = traced(lambda x: x.transpose(0, 1).view(3, 2, 2, 2).view(3, 2, 4, 1) + 1, CUBE)
    after = tidied(before)
    assert ops(after) == ["transpose.int", "view.default", "add.Tensor"]
    assert torch.equal(after(CUBE), before(CUBE))


def _all(nest: Any) -> tuple[Tensor, ...]:
    return nest if isinstance(nest, tuple) else (nest,)


def test_the_gradients_of_a_layer_need_no_turns_of_turns() -> None:
    def step(x: Tensor, weight: Tensor, bias: Tensor) -> list[Tensor]:
        weight, bias = weight.detach().requires_grad_(), bias.detach().requires_grad_()
        loss = functional.gelu(functional.linear(x, weight, bias)).sum()
        return [loss.detach(), *torch.autograd.grad(loss, [weight, bias])]

    given = (CUBE, torch.randn(5, 4), torch.randn(5))
    before = traced(step, *given)
    after = tidied(before)
    assert all(map(torch.equal, after(*given), before(*given)))
    assert ops(after).count("t.default") == 2  # of the weight, and of the gradient
    assert ops(before).count("t.default") > 2


def owned(function: Callable[..., Any], *args: Tensor, start: int = 0) -> list[Tensor]:
    graph_module = traced(function, *args)
    expected = graph_module(*args)
    own_outputs(graph_module.graph, start=start)
    graph_module.recompile()
    found = graph_module(*args)
    assert all(map(torch.equal, found, expected))
    return list(found)


def _addresses(tensors: list[Tensor]) -> list[int]:
    return [one.untyped_storage().data_ptr() for one in tensors]


@pytest.mark.parametrize(
    "function",
    [
        lambda x: [*[x * 2] * 2],
        lambda x: _with_a_view(x * 2),
        lambda x: [x, x * 1],
        lambda x: [x.t(), x.view(24)],
    ],
)
def test_every_gradient_has_memory_of_its_own(function: Callable[..., Any]) -> None:
    addresses = _addresses([X, *owned(function, X)])
    assert len(set(addresses)) == len(addresses)


def _with_a_view(y: Tensor) -> list[Tensor]:
    return [y, y.t(), y[0]]


def test_a_gradient_without_gaps_is_not_copied() -> None:
    graph_module = traced(lambda x: [x.sum(), x * 2, (x * 3).t()], X)
    own_outputs(graph_module.graph, start=1)
    assert "clone.default" not in ops(graph_module)


def test_a_gradient_that_is_one_number_many_times_gets_a_place_for_each() -> None:
    (found,) = owned(lambda x: [x.sum().expand(3, 2)], X)
    found += torch.ones(3, 2)
    assert found.is_contiguous()


def test_outputs_before_the_gradients_are_left_alone() -> None:
    graph_module = traced(lambda x: [x, x * 2], X)
    own_outputs(graph_module.graph, start=1)
    assert "clone.default" not in ops(graph_module)
