"""What dynamo writes into its graphs that no person would write: modes entered and left, bodies."""

from __future__ import annotations

from typing import Any

import torch
from torch.amp.autocast_mode import _enter_autocast, _exit_autocast
from torch.autograd.grad_mode import _enter_inference_mode, _exit_inference_mode

__all__ = [
    "ENTER_AUTOCAST",
    "ENTER_INFERENCE",
    "EXIT_AUTOCAST",
    "EXIT_INFERENCE",
    "SET_GRAD_ENABLED",
    "checkpoint_policy",
    "is_packet",
]

ENTER_AUTOCAST, EXIT_AUTOCAST = _enter_autocast, _exit_autocast
ENTER_INFERENCE, EXIT_INFERENCE = _enter_inference_mode, _exit_inference_mode
SET_GRAD_ENABLED = torch._C._set_grad_enabled


def is_packet(op: Any) -> bool:
    """Whether `op` stands for all overloads of an op, as `aten.add` does."""
    return isinstance(op, torch._ops.OpOverloadPacket)


def checkpoint_policy(body: Any) -> Any:
    """The function that came with a checkpointed body and says what is kept, or None."""
    return body.meta.get("_checkpoint_context_fn")
