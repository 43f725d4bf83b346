"""Calls in dynamo's graphs that compute nothing, but change what the calls after them mean."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
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
    "switched_back",
    "unwraps",
]

_AUTOCAST_DEVICES = ("cpu", "cuda")
_CLOSE_LEVEL: dict[object, Callable[[], int]] = {
    torch._C._functorch.TransformType.Grad: torch._C._functorch._grad_decrement_nesting,
    torch._C._functorch.TransformType.Jvp: torch._C._functorch._jvp_decrement_nesting,
    torch._C._functorch.TransformType.Vmap: torch._C._functorch._vmap_decrement_nesting,
}

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


@contextmanager
def switched_back() -> Iterator[None]:
    """Undo what a graph has turned on if an error ends it before it turns that off.

    Levels of vmap, grad and jvp that stay open make whatever runs next in this process fail.
    """
    depth = torch._C._functorch.get_dynamic_layer_stack_depth()
    autocasts = [torch.is_autocast_enabled(device) for device in _AUTOCAST_DEVICES]
    try:
        yield
    except BaseException:
        while torch._C._functorch.get_dynamic_layer_stack_depth() > depth:
            kind = torch._C._functorch.peek_interpreter_stack().key()
            _CLOSE_LEVEL[kind]()
        with suppress(RuntimeError):  # there is none
            torch._C._exit_dual_level(0)
        torch._C._set_fwd_grad_enabled(True)
        torch._C._autograd._saved_tensors_hooks_enable()
        for device, is_enabled in zip(_AUTOCAST_DEVICES, autocasts, strict=True):
            torch.set_autocast_enabled(device, is_enabled)
        raise


def is_level_machinery(target: object) -> bool:
    """Whether a call serves vmap, grad or jvp, and is nothing that a user wrote."""
    module = str(getattr(target, "__module__", ""))
    return "functorch" in module or module == "torch.autograd.forward_ad"


def _name(target: object) -> str:
    return str(getattr(target, "__name__", "")) if is_level_machinery(target) else ""
