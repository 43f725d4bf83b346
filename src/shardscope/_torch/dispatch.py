"""What a dispatch mode needs to know of the ops that torch hands it."""

from __future__ import annotations

from typing import Any

import torch
from torch._guards import detect_fake_mode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

__all__ = [
    "TorchDispatchMode",
    "has_fakes",
    "is_higher_order",
    "is_overload",
    "op_packet",
    "op_schema",
    "without_modes",
]

without_modes = _disable_current_modes
"""A context in which no dispatch mode sees what we do ourselves."""


def is_higher_order(op: Any) -> bool:
    """Whether `op` takes functions: such ops have no packet and are no collectives."""
    return isinstance(op, torch._ops.HigherOrderOperator)


def is_overload(op: Any) -> bool:
    """Whether `op` is one overload of an op, as `aten.add.Tensor` is."""
    return isinstance(op, torch._ops.OpOverload)


def op_packet(op: Any) -> Any:
    """The packet that `op` is an overload of: `aten.add` of `aten.add.Tensor`."""
    return op._overloadpacket


def op_schema(op: Any) -> Any:
    """The schema of `op`: its arguments with their names and types, and what it returns."""
    return op._schema


def has_fakes(args: Any) -> bool:
    """Whether the op is only tried out for its shapes: on fake tensors, or under their mode."""
    return detect_fake_mode(args) is not None
