"""Fragments, and backends written by hand that are right or wrong in one way each."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from shardscope.compile.diagnose.subgraph.subgraph import Subgraph

__all__ = [
    "after",
    "always_wrong",
    "eager",
    "fails_late",
    "layer",
    "layered",
    "numbers",
    "raises",
    "returns",
    "returns_number",
    "subgraph",
    "wrong_backward",
]

Graph = fx.GraphModule


def subgraph(function: Callable[..., Any], *inputs: Any, with_gradients: bool = True) -> Subgraph:
    """A function as dynamo would hand it on: with a flat tuple for its output."""
    graph = fx.symbolic_trace(function)
    (end,) = graph.graph.find_nodes(op="output")
    if not isinstance(end.args[0], list | tuple):
        end.args = ((end.args[0],),)
    graph.recompile()
    return Subgraph(graph, inputs, with_gradients)


def eager(graph: Graph, inputs: Any) -> Callable[..., Any]:
    return graph.forward


def after(change: Callable[[Any], Any]) -> Callable[..., Any]:
    """A backend whose results are changed: all of them, as a list."""

    def backend(graph: Graph, inputs: Any) -> Callable[..., Any]:
        return lambda *given: change(list(graph(*given)))

    return backend


def returns(function: Callable[..., Any]) -> Callable[..., Any]:
    """A backend that makes the same of every graph."""
    return lambda graph, inputs: function


def raises(error: Exception, *, when: str) -> Callable[..., Any]:
    def backend(graph: Graph, inputs: Any) -> Callable[..., Any]:
        if when == "compiling":
            raise error

        def run(*given: Any) -> Any:
            if when == "running":
                raise error
            return [_FailsBackward.apply(value, error) for value in graph(*given)]

        return run

    return backend


class _FailsBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, error: Exception) -> Tensor:
        ctx.error = error
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise ctx.error


class _Multiplies(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0] * ctx.factor, None


def wrong_backward(graph: Graph, inputs: Any, factor: float = 2.0) -> Callable[..., Any]:
    return lambda *given: [_Multiplies.apply(value, factor) for value in graph(*given)]


def fails_late(graph: Graph, inputs: Any) -> Any:
    """Compiles forward and backward with aot_autograd; backward cannot be compiled."""
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    def refuse(graph: Graph, inputs: Any) -> Any:
        raise NotImplementedError("no backward here")

    return aot_autograd(
        fw_compiler=lambda graph, inputs: make_boxed_func(graph.forward), bw_compiler=refuse
    )(graph, inputs)


def always_wrong(graph: Graph, inputs: Any) -> Callable[..., Any]:
    """Another wrong result each time."""
    count = itertools.count(2)
    return lambda *given: [value * next(count) for value in graph(*given)]


def returns_number(graph: Graph, inputs: Any) -> int:
    return 3


def numbers(*shape: int, grad: bool = True, seed: int = 1, dtype=torch.float32) -> torch.Tensor:
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return drawn.to(dtype).requires_grad_(grad)


def layer(x, w):
    return torch.relu(x @ w).sum(-1)


def layered():
    return subgraph(layer, numbers(8, 16), numbers(16, 16, seed=2))
