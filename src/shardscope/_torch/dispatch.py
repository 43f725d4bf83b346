"""What a dispatch mode needs to know of the ops that torch hands it."""

from __future__ import annotations

from typing import Any

import torch
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

__all__ = [
    "READ_VALUE",
    "TORCHS_OWN",
    "DataDependentOutputException",
    "TorchDispatchMode",
    "has_fakes",
    "has_modes",
    "is_higher_order",
    "is_overload",
    "is_up_to_a_mode",
    "op_packet",
    "op_schema",
    "without_modes",
]

READ_VALUE = torch.ops.aten._local_scalar_dense.default
"""The op behind `.item()`."""

TORCHS_OWN = ("aten", "prims", "inductor_prims", "prim")
"""Namespaces of ops that come with torch."""

without_modes = _disable_current_modes
"""A context in which no dispatch mode sees what we do ourselves."""


_num_modes = torch._C._len_torch_dispatch_stack


def has_modes() -> bool:
    """Whether any dispatch mode is active on this thread."""
    return bool(_num_modes())


def is_up_to_a_mode() -> bool:
    """Whether the innermost dispatch mode, if not torch's own, decides if an op is issued at all.

    Selective checkpointing answers with what it had saved; one that issues the op comes back.
    """
    num_modes = _num_modes()
    if not num_modes:
        return False
    innermost = torch._C._get_dispatch_stack_at(num_modes - 1)
    return getattr(innermost, "_mode_key", None) is None


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
