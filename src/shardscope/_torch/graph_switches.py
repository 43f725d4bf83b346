"""Calls in dynamo's graphs that compute nothing, but change what the calls after them mean."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

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
    "switched_back",
    "unwraps",
]

_functorch = find_name(
    "torch._C._functorch", "close functorch levels (vmap, grad, jvp) that were left open"
)
_AUTOCAST_DEVICES = ("cpu", "cuda")
_CLOSE_LEVEL = {
    "Grad": "_grad_decrement_nesting",
    "Jvp": "_jvp_decrement_nesting",
    "Vmap": "_vmap_decrement_nesting",
}
_NEED = "recognise calls in graphs that set a global mode"

_SET_FORWARD_GRAD = find_name("torch._C._set_fwd_grad_enabled", _NEED)
_ENABLE_HOOKS = find_name("torch._C._autograd._saved_tensors_hooks_enable", _NEED)

SETTERS: dict[Callable[..., Any], str] = {
    SET_GRAD_ENABLED: "grad",
    _SET_FORWARD_GRAD: "forward grad",
    find_name("torch._C._autograd._saved_tensors_hooks_disable", _NEED): "saved tensors",
    _ENABLE_HOOKS: "saved tensors",
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


def unwraps(target: object) -> bool:
    """Whether a call inside of such a level gives what can be read outside of it."""
    return _name(target).endswith(("_unwrap_for_grad", "_remove_batch_dim", "_unwrap_batched"))


@contextmanager
def switched_back() -> Iterator[None]:
    """Undo what a graph has turned on if an error ends it before it turns that off.

    Levels of vmap, grad and jvp that stay open make whatever runs next in this process fail.
    """
    depth = _functorch.get_dynamic_layer_stack_depth()
    autocasts = [torch.is_autocast_enabled(device) for device in _AUTOCAST_DEVICES]
    try:
        yield
    except BaseException:
        while _functorch.get_dynamic_layer_stack_depth() > depth:
            kind = _functorch.peek_interpreter_stack().key()
            getattr(_functorch, _CLOSE_LEVEL[kind.name])()
        with suppress(RuntimeError):  # there is none
            torch._C._exit_dual_level(0)
        _SET_FORWARD_GRAD(True)
        _ENABLE_HOOKS()
        for device, is_enabled in zip(_AUTOCAST_DEVICES, autocasts, strict=True):
            torch.set_autocast_enabled(device, is_enabled)
        raise


def is_level_machinery(target: object) -> bool:
    """Whether a call serves vmap, grad or jvp, and is nothing that a user wrote."""
    module = str(getattr(target, "__module__", ""))
    return "functorch" in module or module == "torch.autograd.forward_ad"


def _name(target: object) -> str:
    return str(getattr(target, "__name__", "")) if is_level_machinery(target) else ""
