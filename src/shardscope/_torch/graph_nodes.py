"""What dynamo writes into its graphs that no person would write: modes entered and left, bodies."""

from __future__ import annotations

from typing import Any

from shardscope._torch.private import find_name

__all__ = [
    "ENTER_AUTOCAST",
    "ENTER_INFERENCE",
    "EXIT_AUTOCAST",
    "EXIT_INFERENCE",
    "SET_GRAD_ENABLED",
    "checkpoint_policy",
    "is_packet",
]

_NEED = "recognise calls in graphs that set a global mode"

ENTER_AUTOCAST = find_name("torch.amp.autocast_mode._enter_autocast", _NEED)
EXIT_AUTOCAST = find_name("torch.amp.autocast_mode._exit_autocast", _NEED)
ENTER_INFERENCE = find_name("torch.autograd.grad_mode._enter_inference_mode", _NEED)
EXIT_INFERENCE = find_name("torch.autograd.grad_mode._exit_inference_mode", _NEED)
SET_GRAD_ENABLED = find_name("torch._C._set_grad_enabled", _NEED)
_Packet = find_name("torch._ops.OpOverloadPacket", "recognise ops")


def is_packet(op: Any) -> bool:
    """Whether `op` stands for all overloads of an op, as `aten.add` does."""
    return isinstance(op, _Packet)


def checkpoint_policy(body: Any) -> Any:
    """The function that came with a checkpointed body and says what is kept, or None."""
    return body.meta.get("_checkpoint_context_fn")
