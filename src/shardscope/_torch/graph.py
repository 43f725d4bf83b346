"""Calls in dynamo's graphs that do not come from user code: entering and leaving autocast and
other modes, levels of vmap and grad, global switches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

from shardscope._torch.private import find_name

_NEED = "recognise calls in graphs that set a global mode"

ENTER_AUTOCAST = find_name("torch.amp.autocast_mode._enter_autocast", _NEED)
EXIT_AUTOCAST = find_name("torch.amp.autocast_mode._exit_autocast", _NEED)
ENTER_INFERENCE = find_name("torch.autograd.grad_mode._enter_inference_mode", _NEED)
EXIT_INFERENCE = find_name("torch.autograd.grad_mode._exit_inference_mode", _NEED)
SET_GRAD_ENABLED = find_name("torch._C._set_grad_enabled", _NEED)
_Packet = find_name("torch._ops.OpOverloadPacket", "recognise ops")


def is_packet(op: Any) -> bool:
    """Whether `op` is a packet, all overloads of an op, as `aten.add` is."""
    return isinstance(op, _Packet)


def checkpoint_policy(body: Any) -> Any:
    """The `context_fn` of a checkpointed body, which decides what is saved, or None."""
    return body.meta.get("_checkpoint_context_fn")


_functorch = find_name(
    "torch._C._functorch", "close functorch levels (vmap, grad, jvp) that were left open"
)
_AUTOCAST_DEVICES = ("cpu", "cuda")
_CLOSE_LEVEL = {
    "Grad": "_grad_decrement_nesting",
    "Jvp": "_jvp_decrement_nesting",
    "Vmap": "_vmap_decrement_nesting",
}

_SET_FORWARD_GRAD = find_name("torch._C._set_fwd_grad_enabled", _NEED)
_ENABLE_HOOKS = find_name("torch._C._autograd._saved_tensors_hooks_enable", _NEED)

SETTERS: dict[Callable[..., Any], str] = {
    SET_GRAD_ENABLED: "grad",
    _SET_FORWARD_GRAD: "forward grad",
    find_name("torch._C._autograd._saved_tensors_hooks_disable", _NEED): "saved tensors",
    _ENABLE_HOOKS: "saved tensors",
    find_name("torch.nn.attention._sdpa_kernel", _NEED): "attention",
}
"""Functions that set a global mode until the next call of the same kind."""

EXITS: dict[Callable[..., Any], Callable[..., Any]] = {
    EXIT_AUTOCAST: ENTER_AUTOCAST,
    EXIT_INFERENCE: ENTER_INFERENCE,
    find_name("torch.cuda._maybe_exchange_device", _NEED): find_name(
        "torch.cuda._exchange_device", _NEED
    ),
}
"""By function that undoes an earlier call, given its result: the function of that call."""


def opens_level(target: object) -> bool:
    """Whether a call opens a functorch level (vmap, grad, jvp), whose tensors are wrapped."""
    return _name(target).endswith("increment_nesting")


def closes_level(target: object) -> bool:
    """Whether a call closes a functorch level."""
    return _name(target).endswith("decrement_nesting")


def unwraps(target: object) -> bool:
    """Whether a call inside a functorch level returns a tensor that is valid outside of it."""
    return _name(target).endswith(("_unwrap_for_grad", "_remove_batch_dim", "_unwrap_batched"))


@contextmanager
def switched_back() -> Iterator[None]:
    """If a graph raises, leave the modes and functorch levels that it has entered.

    Levels of vmap, grad and jvp that stay open would make later code in this process fail.
    """
    depth = _functorch.get_dynamic_layer_stack_depth()
    autocasts = [torch.is_autocast_enabled(device) for device in _AUTOCAST_DEVICES]
    try:
        yield
    except BaseException:
        while _functorch.get_dynamic_layer_stack_depth() > depth:
            kind = _functorch.peek_interpreter_stack().key()
            getattr(_functorch, _CLOSE_LEVEL[kind.name])()
        with suppress(RuntimeError):  # no level is open
            torch._C._exit_dual_level(0)
        _SET_FORWARD_GRAD(True)
        _ENABLE_HOOKS()
        for device, is_enabled in zip(_AUTOCAST_DEVICES, autocasts, strict=True):
            torch.set_autocast_enabled(device, is_enabled)
        raise


def is_level_machinery(target: object) -> bool:
    """Whether a call belongs to functorch or forward AD, not to user code."""
    module = str(getattr(target, "__module__", ""))
    return "functorch" in module or module == "torch.autograd.forward_ad"


def _name(target: object) -> str:
    return str(getattr(target, "__name__", "")) if is_level_machinery(target) else ""
