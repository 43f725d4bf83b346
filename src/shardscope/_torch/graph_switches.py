"""Calls in dynamo's graphs that compute nothing, but change what the calls after them mean."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shardscope._torch.graph_nodes import (
    ENTER_AUTOCAST,
    ENTER_INFERENCE,
    EXIT_AUTOCAST,
    EXIT_INFERENCE,
    SET_GRAD_ENABLED,
)
from shardscope._torch.private import find_name

__all__ = [
    "EXITS",
    "SETTERS",
    "closes_level",
    "is_level_machinery",
    "opens_level",
]

_NEED = "tell calls in graphs that turn something on or off"

SETTERS: dict[Callable[..., Any], str] = {
    SET_GRAD_ENABLED: "grad",
    find_name("torch._C._set_fwd_grad_enabled", _NEED): "forward grad",
    find_name("torch._C._autograd._saved_tensors_hooks_disable", _NEED): "saved tensors",
    find_name("torch._C._autograd._saved_tensors_hooks_enable", _NEED): "saved tensors",
    find_name("torch.nn.attention._sdpa_kernel", _NEED): "attention",
}
"""What holds until the next call of the same kind."""

EXITS: dict[Callable[..., Any], Callable[..., Any]] = {
    EXIT_AUTOCAST: ENTER_AUTOCAST,
    EXIT_INFERENCE: ENTER_INFERENCE,
    find_name("torch.cuda._maybe_exchange_device", _NEED): find_name(
        "torch.cuda._exchange_device", _NEED
    ),
}
"""What undoes the call whose result it is given, and what that calls."""


def opens_level(target: object) -> bool:
    """Whether tensors are of another kind from here on: inside vmap, grad, jvp."""
    return _name(target).endswith("increment_nesting")


def closes_level(target: object) -> bool:
    """Whether that ends here."""
    return _name(target).endswith("decrement_nesting")


def is_level_machinery(target: object) -> bool:
    """Whether a call serves vmap, grad or jvp, and is nothing that a user wrote."""
    return "functorch" in str(getattr(target, "__module__", ""))


def _name(target: object) -> str:
    return str(getattr(target, "__name__", "")) if is_level_machinery(target) else ""
