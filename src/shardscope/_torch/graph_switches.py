"""Calls in dynamo's graphs that compute nothing, but change what the calls after them mean."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.amp.autocast_mode import _enter_autocast, _exit_autocast
from torch.autograd.grad_mode import _enter_inference_mode, _exit_inference_mode
from torch.nn.attention import _sdpa_kernel

__all__ = [
    "EXITS",
    "SETTERS",
    "SET_GRAD",
    "closes_level",
    "is_level_machinery",
    "opens_level",
    "unwraps",
]

SET_GRAD: Callable[..., Any] = torch._C._set_grad_enabled

SETTERS: dict[Callable[..., Any], str] = {
    SET_GRAD: "grad",
    torch._C._set_fwd_grad_enabled: "forward grad",
    torch._C._autograd._saved_tensors_hooks_disable: "saved tensors",
    torch._C._autograd._saved_tensors_hooks_enable: "saved tensors",
    _sdpa_kernel: "attention",
}
"""What holds until the next call of the same kind."""

EXITS: dict[Callable[..., Any], Callable[..., Any]] = {
    _exit_autocast: _enter_autocast,
    _exit_inference_mode: _enter_inference_mode,
    torch.cuda._maybe_exchange_device: torch.cuda._exchange_device,
}
"""What undoes the call whose result it is given, and what that calls."""


def opens_level(target: object) -> bool:
    """Whether tensors are of another kind from here on: inside vmap, grad, jvp."""
    return _name(target).endswith("increment_nesting")


def closes_level(target: object) -> bool:
    """Whether that ends here."""
    return _name(target).endswith("decrement_nesting")


def unwraps(target: object) -> bool:
    """Whether a call inside of such a level gives what can be read outside of it."""
    return _name(target).endswith(("_unwrap_for_grad", "_remove_batch_dim", "_unwrap_batched"))


def is_level_machinery(target: object) -> bool:
    """Whether a call serves vmap, grad or jvp, and is nothing that a user wrote."""
    module = str(getattr(target, "__module__", ""))
    return "functorch" in module or module == "torch.autograd.forward_ad"


def _name(target: object) -> str:
    return str(getattr(target, "__name__", "")) if is_level_machinery(target) else ""
