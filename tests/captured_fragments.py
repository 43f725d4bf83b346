"""Fragments for tests: real graphs of dynamo's, of models of many kinds."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from shardscope.compile.diagnose.subgraph.subgraph import Subgraph

__all__ = ["PROGRAMS", "capture", "run"]


def capture(function: Callable[..., Any], *args: Any, **options: Any) -> list[Subgraph]:
    """The graphs that dynamo makes of one call, with what each is called with."""
    subgraphs: list[Subgraph] = []

    def keep(graph: torch.fx.GraphModule, _: object) -> Callable[..., Any]:
        def call(*inputs: Any) -> Any:
            leaves = tuple(_leaf(value) for value in inputs)
            wanting = [
                leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad
            ]
            subgraphs.append(Subgraph(graph, leaves, with_gradients=bool(wanting)))
            return graph(*inputs)

        return call

    torch._dynamo.reset()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # dynamo's own, of autograd functions
            torch.compile(function, backend=keep, **options)(*args)
    finally:
        torch._dynamo.reset()
    return subgraphs


def run(subgraph: Subgraph) -> tuple[list[Any], list[Any]]:
    """Outputs and gradients, of copies of the inputs, with random numbers from the start."""
    inputs = [_leaf(value, copy=True) for value in subgraph.inputs]
    torch.manual_seed(0)
    outputs = [
        _leaf(value, copy=True) if value is None else value for value in subgraph.graph(*inputs)
    ]
    wanted = [value for value in inputs if isinstance(value, torch.Tensor) and value.requires_grad]
    differentiable = [
        output for output in outputs if isinstance(output, torch.Tensor) and output.requires_grad
    ]
    gradients: list[Any] = []
    if wanted and differentiable:
        total = torch.stack([value.double().square().sum() for value in differentiable]).sum()
        gradients = list(torch.autograd.grad(total, wanted, allow_unused=True))
    return outputs, gradients


def _leaf(value: Any, *, copy: bool = False) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    leaf = value.detach().clone() if copy else value.detach()
    return leaf.requires_grad_(value.requires_grad)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)
        self.out = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).view(2, 4, 3, 2, 4).permute(2, 0, 3, 1, 4).unbind(0)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(functional.dropout(self.embed(x), 0.5))


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return 3 * x * x * grad


@torch.library.custom_op("shardscope_tests::double", mutates_args=())
def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@double.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


double.register_autograd(lambda ctx, grad: double(grad))


def conv(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    x = x.to(memory_format=torch.channels_last)
    y = functional.relu(functional.conv2d(x, w, padding=1))
    return functional.max_pool2d(y, 2).contiguous()


def branch(x: torch.Tensor) -> torch.Tensor:
    return torch.cond(x.sum() > 0, lambda x: x.sin() * 2, lambda x: x.cos(), (x,))


def recomputed(x: torch.Tensor) -> torch.Tensor:
    return checkpoint(lambda x: torch.tanh(x) @ x, x, use_reentrant=False) + 1


def in_place(x: torch.Tensor) -> torch.Tensor:
    y = torch.zeros(4, 4, dtype=torch.float64, device="cpu")
    y[..., 1:3] = x[:, None, ::2].sum(-1)
    y.add_(1).clamp_(max=2)
    return y.to(torch.float32)


def indexed(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    picked = x[rows, :, None][..., 0]
    return torch.einsum("ij,kj->ik", picked, x).index_add(0, rows, torch.ones(3, 4))


def listed(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    first, second = torch.split(x, [1, 3])
    top = torch.topk(torch.cat([second, first]), k=2, dim=-1)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        z = x @ x
    return top.values, top.indices, torch.nn.functional.gelu(z.float(), approximate="tanh")


@dataclass(frozen=True)
class Program:
    """A function and how to make its arguments."""

    function: Callable[..., Any]
    args: Callable[[], tuple[Any, ...]]


def _square() -> tuple[Any, ...]:
    return (torch.linspace(-1, 1, 16).view(4, 4).requires_grad_(),)


def _modules() -> Iterator[tuple[str, Program]]:
    torch.manual_seed(1)
    yield "attention", Program(Attention(), lambda: (torch.ones(2, 4, 8),))
    yield "tied embedding", Program(Tied(), lambda: (torch.tensor([[1, 2, 1]]),))
    cell = nn.LSTMCell(3, 4)
    yield "lstm", Program(lambda x: cell(x[1], cell(x[0])), lambda: (torch.ones(2, 2, 3),))


PROGRAMS = {
    "conv": Program(
        conv, lambda: (torch.ones(1, 3, 4, 4), torch.full((2, 3, 3, 3), 0.1, requires_grad=True))
    ),
    "cond": Program(branch, _square),
    "checkpoint": Program(recomputed, _square),
    "autograd function": Program(lambda x: Cube.apply(x).sum(), _square),
    "in place": Program(in_place, _square),
    "index": Program(indexed, lambda: (*_square(), torch.tensor([0, 2, 1]))),
    "lists": Program(listed, _square),
    "custom op": Program(lambda x: double(x).sin(), _square),
    **dict(_modules()),
}
