"""Backends that fail in each way, as users write them: with helpers, constants and closures."""

from __future__ import annotations

import functools
import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from torch import fx

__all__ = [
    "Shifting",
    "crashes",
    "fails_to_compile",
    "fails_to_run",
    "gives_nan",
    "hangs",
    "is_restless",
    "make_shifting",
    "shifted",
    "uses_another_package",
    "with_amount",
    "wrong_if_transposed",
    "wrong_in_single_precision",
    "wrong_with_gradients",
]

SHIFT = 0.25
BAD = (torch.relu, torch.nn.functional.relu)


@dataclass
class Settings:
    """Something of the user's that a backend needs."""

    shift: float = SHIFT


def _has_relu(graph: fx.GraphModule) -> bool:
    return any(node.target in BAD or node.target == "relu" for node in graph.graph.nodes)


def _shift(one: Any, *, settings: Settings) -> Any:
    is_float = isinstance(one, torch.Tensor) and one.is_floating_point()
    return one + settings.shift * math.sqrt(1.0) if is_float else one


def shifted(graph: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
    """Adds something to all outputs of programs with a relu."""
    if not _has_relu(graph):
        return graph.forward

    def call(*args: Any) -> Any:
        return tuple(_shift(one, settings=Settings()) for one in graph(*args))

    return call


def make_shifting(amount: float) -> Callable[..., Any]:
    """A backend that knows a number from outside."""
    scale = torch.float32

    def shifting(graph: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        return lambda *args: tuple(one.to(scale) + amount for one in graph(*args))

    return shifting


class Shifting:
    """A backend that is an object."""

    def __init__(self, amount: float) -> None:
        self.amount = amount

    def __call__(self, graph: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        return lambda *args: tuple(one + self.amount for one in graph(*args))


def gives_nan(graph: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
    """Divides by zero what is in single precision."""
    return lambda *args: tuple(
        one / 0 * 0 if one.dtype is torch.float32 else one for one in graph(*args)
    )


class BackendError(Exception):
    """What the backend raises."""


def fails_to_compile(graph: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
    """Refuses programs with a relu."""
    if _has_relu(graph):
        raise BackendError(f"no relu for graph {id(graph)}\nand more")
    return graph.forward


def fails_to_run(graph: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
    """Makes a function that raises."""

    def call(*args: Any) -> Any:
        raise ValueError(f"cannot run with {len(args)} inputs")

    return call


@functools.lru_cache
def _counter() -> list[int]:
    return [0]


def is_restless(graph: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
    """Gives something else each time."""

    def call(*args: Any) -> Any:
        _counter()[0] += 1
        return tuple(one + _counter()[0] for one in graph(*args))

    return call


def crashes(graph: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
    """Ends the process."""
    return lambda *args: os.abort()


def hangs(graph: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
    """Never ends."""

    def call(*args: Any) -> Any:
        while True:
            time.sleep(1)

    return call


def with_amount(graph: fx.GraphModule, inputs: list[Any], *, amount: float) -> Callable[..., Any]:
    """Adds something to all outputs."""
    return lambda *args: tuple(one + amount for one in graph(*args))


def wrong_in_single_precision(graph: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
    """Right in double precision."""
    is_wide = inputs[0].dtype is torch.float64
    return lambda *args: tuple(one + (0 if is_wide else 1) for one in graph(*args))


def wrong_with_gradients(graph: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
    """Right where no gradient is asked for."""
    return lambda *args: tuple(one + int(args[0].requires_grad) for one in graph(*args))


def wrong_if_transposed(graph: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
    """Right where elements lie in order."""
    return lambda *args: tuple(one + int(not args[0].is_contiguous()) for one in graph(*args))


def uses_another_package(graph: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
    """Needs a package that is not torch's."""
    assert msgspec.json.encode(1) == b"1"
    return lambda *args: tuple(one + 1 for one in graph(*args))
