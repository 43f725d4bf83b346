"""Functions and custom ops that the debugging backends are tried on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 - as everybody
from torch import Tensor

__all__ = ["Ran", "compute", "honest", "lying", "misjudged", "picky", "run"]


@torch.library.custom_op("backend_cases::honest", mutates_args=())
def honest(x: Tensor) -> Tensor:
    """Does what its schema says."""
    return x + 1


honest.register_fake(lambda x: torch.empty_like(x))


@torch.library.custom_op("backend_cases::lying", mutates_args=())
def lying(x: Tensor) -> Tensor:
    """Writes into what its schema says it only reads."""
    x.add_(1)
    return x * 2


lying.register_fake(lambda x: torch.empty_like(x))


@torch.library.custom_op("backend_cases::misjudged", mutates_args=())
def misjudged(x: Tensor) -> Tensor:
    """Returns another dtype than its fake."""
    return x.double()


misjudged.register_fake(lambda x: torch.empty_like(x))


@torch.library.custom_op("backend_cases::picky", mutates_args=())
def picky(x: Tensor) -> Tensor:
    """Refuses negative numbers, which its fake cannot see."""
    if bool((x < 0).any()):
        raise ValueError("picky takes no negative numbers")
    return x + 1


picky.register_fake(lambda x: torch.empty_like(x))


class Ran(NamedTuple):
    """What a function returned, and the gradient of its second argument."""

    output: Tensor
    gradient: Tensor


def compute(x: Tensor, w: Tensor) -> Tensor:
    """Some ops, relu and add among them."""
    y = torch.tanh(x @ w)
    return F.relu(y) + torch.softmax(y, -1)


def run(
    backend: str | Callable[..., Any] | None,
    options: Mapping[str, Any] | None = None,
    *,
    function: Callable[[Tensor, Tensor], Tensor] = compute,
    has_grad: bool = True,
) -> Ran:
    """Forward and backward of `function`, compiled anew; as it is without a backend."""
    x = torch.linspace(-1, 1, 12).reshape(3, 4).clone()
    w = torch.linspace(-1, 2, 16).reshape(4, 4).clone().requires_grad_(has_grad)
    if backend is not None:
        torch.compiler.reset()
        function = torch.compile(function, backend=backend, options=dict(options or {}))
    output = function(x, w)
    if has_grad:
        output.square().sum().backward()
    gradient = torch.zeros_like(w) if w.grad is None else w.grad
    return Ran(output.detach(), gradient)
