"""Functions to diagnose, with lines that are to be found, and backends that nobody registered."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, fx, nn

from home_workers import Death, Sleep

__all__ = [
    "BUILT",
    "Adds",
    "Kept",
    "broken",
    "counts",
    "crashes",
    "deep",
    "drawn",
    "draws_again",
    "line_of",
    "optimized",
    "rests",
    "rounds_late",
    "sleeps",
    "switched",
]

Graph = fx.GraphModule
_FILE = Path(__file__)


def line_of(code: str) -> int:
    """The number of the only line of this file with this code."""
    (number,) = (n for n, line in enumerate(_lines(), 1) if line.strip() == code)
    return number


def _lines() -> list[str]:
    return _FILE.read_text().splitlines()


def broken(x: Tensor, w: Tensor | None = None) -> Tensor:
    """Two graphs: printing is for neither."""
    x = torch.sin(x)
    if w is not None:
        x = x @ w
    print(end="")
    x = torch.relu(x)
    return torch.cos(x)


def deep(x: Tensor) -> Tensor:
    """One op between many, one at the end."""
    for _ in range(6):
        x = x.sin()
    x = torch.relu(x) * 2
    for _ in range(4):
        x = torch.cos(x)
    return torch.tanh(x)


def switched(x: Tensor) -> Tensor:
    """Autocast is turned on and off, and something is mapped."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return torch.vmap(torch.relu)(x @ x)


def optimized(w: Tensor) -> Tensor:
    """The optimizer, whose parameters dynamo keeps in a graph, is gone when it ends."""
    optimizer = torch.optim.SGD([w], 0.1)
    w.square().sum().backward()
    optimizer.step()
    return w


def drawn(x: Tensor) -> Tensor:
    """Something drawn at random."""
    return nn.functional.dropout(x, 0.5) * 3


@final
class Kept(nn.Module):
    """Tied weights, a shared module, buffers that change, keyword arguments, a dict of outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 8)
        self.shared = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 10, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor, *, scale: Tensor | None = None) -> dict[str, Any]:
        h = self.shared(self.shared(self.embedding(ids)))
        h = self.norm(h)
        if scale is not None:
            h = h * scale
        logits = self.head(torch.relu(h))
        return {"logits": logits, "rest": [h, None, 3]}


@final
class Adds:
    """A backend: adds to whatever graphs that have an op compute."""

    def __init__(self, op: str, by: float = 1.0) -> None:
        self._op = op
        self._by = by

    def __call__(self, graph: Graph, _: Any) -> Callable[..., Any]:
        is_wrong = _has(graph, self._op)
        return lambda *given: [value + self._by * is_wrong for value in graph(*given)]


BUILT: list[Graph] = []


def counts(graph: Graph, inputs: Any) -> Callable[..., Any]:
    """A backend that is wrong where there is a relu, and keeps what it was called for."""
    BUILT.append(graph)
    return Adds("relu")(graph, inputs)


def rounds_late(graph: Graph, _: Any) -> Callable[..., Any]:
    """A backend that computes in more precision than it was asked to."""

    def run(*given: Any) -> Any:
        return [value.to(given[0].dtype) for value in graph(*(value.double() for value in given))]

    return run


def draws_again(graph: Graph, _: Any) -> Callable[..., Any]:
    """A backend that draws other numbers."""

    def run(*given: Any) -> Any:
        torch.rand(3)
        return graph(*given)

    return run


def rests(graph: Graph, _: Any) -> Callable[..., Any]:
    """A backend that is right every other time."""
    count = itertools.count(1)

    def run(*given: Any) -> list[Any]:
        factor = 1 + next(count) % 2
        return [value * factor for value in graph(*given)]

    return run


def crashes(graph: Graph, _: Any) -> Callable[..., Any]:
    """A backend whose code dies where there is a relu."""
    return _end_with(Death, graph)


def sleeps(graph: Graph, _: Any) -> Callable[..., Any]:
    """A backend whose code does not come back where there is a relu."""
    return _end_with(Sleep, graph)


def _end_with(end: type[BaseException], graph: Graph) -> Callable[..., Any]:
    def run(*given: Any) -> Any:
        if _has(graph, "relu"):
            raise end
        return graph(*given)

    return run


def _has(graph: Graph, op: str) -> bool:
    return any(getattr(node.target, "__name__", "") == op for node in graph.graph.nodes)
