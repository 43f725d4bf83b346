"""Small models whose bytes can be counted by hand, for tests of memory."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

__all__ = ["DIM", "WEIGHT", "backward", "chain", "rows"]

DIM = 256
WEIGHT = DIM * DIM * 4


def chain(length: int) -> nn.Sequential:
    """So many linear layers without biases."""
    return nn.Sequential(*(nn.Linear(DIM, DIM, bias=False) for _ in range(length)))


def rows(number: int = DIM) -> torch.Tensor:
    """An input for them."""
    return torch.randn(number, DIM)


def backward(model: nn.Module) -> Callable[[], None]:
    """A step: forwards, and backwards."""
    return lambda: model(rows()).sum().backward()
