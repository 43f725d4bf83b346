"""eliminate_noops and unalias_outputs remove or add ops without changing any number."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional

from shardscope.parallel.passes.backward import eliminate_noops, unalias_outputs

aten = torch.ops.aten
X = torch.randn(4, 6)
CUBE = torch.randn(2, 3, 4)


def traced(function: Callable[..., Any], *args: Tensor) -> fx.GraphModule:
    graph_module = make_fx(function, tracing_mode="fake")(*args)
    assert isinstance(graph_module, fx.GraphModule)
    return graph_module


def simplified(graph_module: fx.GraphModule) -> fx.GraphModule:
    after = copy.deepcopy(graph_module)
    eliminate_noops(after.graph)
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


@pytest.mark.parametrize(("name", "function", "wanted"), CASES, ids=[case[0] for case in CASES])
def test_noops_are_removed_and_numbers_unchanged(
    name: str, function: Callable[..., Any], wanted: list[str]
) -> None:
    before = traced(function, X)
    after = simplified(before)
    assert ops(after) == wanted
    actual, expected = after(X), before(X)
    for result, reference in zip(_all(actual), _all(expected), strict=True):
        assert torch.equal(result, reference)
        assert result.stride() == reference.stride()


def test_a_view_of_a_view_of_a_strided_tensor_stays_a_view() -> None:
    before = traced(lambda x: x.transpose(0, 1).view(3, 2, 2, 2).view(3, 2, 4, 1) + 1, CUBE)
    after = simplified(before)
    assert ops(after) == ["transpose.int", "view.default", "add.Tensor"]
    assert torch.equal(after(CUBE), before(CUBE))


def _all(nest: Any) -> tuple[Tensor, ...]:
    return nest if isinstance(nest, tuple) else (nest,)


def test_the_gradients_of_a_layer_have_no_double_transposes() -> None:
    def step(x: Tensor, weight: Tensor, bias: Tensor) -> list[Tensor]:
        weight, bias = weight.detach().requires_grad_(), bias.detach().requires_grad_()
        loss = functional.gelu(functional.linear(x, weight, bias)).sum()
        return [loss.detach(), *torch.autograd.grad(loss, [weight, bias])]

    inputs = (CUBE, torch.randn(5, 4), torch.randn(5))
    before = traced(step, *inputs)
    after = simplified(before)
    assert all(map(torch.equal, after(*inputs), before(*inputs)))
    assert ops(after).count("t.default") == 2  # of the weight, and of the gradient
    assert ops(before).count("t.default") > 2


def unaliased(function: Callable[..., Any], *args: Tensor, start: int = 0) -> list[Tensor]:
    graph_module = traced(function, *args)
    expected = graph_module(*args)
    unalias_outputs(graph_module.graph, start=start)
    graph_module.recompile()
    results = graph_module(*args)
    assert all(map(torch.equal, results, expected))
    return list(results)


def _addresses(tensors: list[Tensor]) -> list[int]:
    return [tensor.untyped_storage().data_ptr() for tensor in tensors]


@pytest.mark.parametrize(
    "function",
    [
        lambda x: [*[x * 2] * 2],
        lambda x: _with_a_view(x * 2),
        lambda x: [x, x * 1],
        lambda x: [x.t(), x.view(24)],
    ],
)
def test_every_gradient_has_its_own_storage(function: Callable[..., Any]) -> None:
    addresses = _addresses([X, *unaliased(function, X)])
    assert len(set(addresses)) == len(addresses)


def _with_a_view(y: Tensor) -> list[Tensor]:
    return [y, y.t(), y[0]]


def test_a_contiguous_gradient_is_not_copied() -> None:
    graph_module = traced(lambda x: [x.sum(), x * 2, (x * 3).t()], X)
    unalias_outputs(graph_module.graph, start=1)
    assert "clone.default" not in ops(graph_module)


def test_an_expanded_gradient_is_materialized() -> None:
    (results,) = unaliased(lambda x: [x.sum().expand(3, 2)], X)
    results += torch.ones(3, 2)
    assert results.is_contiguous()


def test_outputs_before_the_gradients_are_unchanged() -> None:
    graph_module = traced(lambda x: [x, x * 2], X)
    unalias_outputs(graph_module.graph, start=1)
    assert "clone.default" not in ops(graph_module)
