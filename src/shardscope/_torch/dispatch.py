"""What a dispatch mode needs to know of the ops that torch hands it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardscope._torch.private import find_exception, find_name

__all__ = [
    "NEEDED_OF_MODES",
    "READ_VALUE",
    "TORCHS_OWN",
    "DataDependentOutputException",
    "TorchDispatchMode",
    "detect_fake_mode",
    "has_fakes",
    "has_modes",
    "is_higher_order",
    "is_overload",
    "is_up_to_a_mode",
    "op_packet",
    "op_schema",
    "without_modes",
]

detect_fake_mode = find_name(
    "torch._guards.detect_fake_mode",
    "distinguish shape propagation from ops that are run, and worlds without data",
)
DataDependentOutputException = find_exception(
    "torch._subclasses.fake_tensor.DataDependentOutputException",
    "locate code that reads the value of a tensor without data",
)
if TYPE_CHECKING:
    from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
    from torch.utils._python_dispatch import _disable_current_modes
else:
    _disable_current_modes = find_name(
        "torch.utils._python_dispatch._disable_current_modes",
        "keep its own tensor work out of users' dispatch modes",
    )
    TorchDispatchMode = find_name(
        "torch.utils._python_dispatch.TorchDispatchMode", "observe the ops of a step"
    )

READ_VALUE = find_name(
    "torch.ops.aten._local_scalar_dense.default",
    "handle code that reads the value of a tensor without data",
)
"""The op behind `.item()`."""

TORCHS_OWN = ("aten", "prims", "inductor_prims", "prim")
"""Namespaces of ops that come with torch."""

without_modes = _disable_current_modes
"""A context in which no dispatch mode sees what we do ourselves."""


_num_modes = find_name(
    "torch._C._len_torch_dispatch_stack",
    "let selective checkpointing decide whether an op is run",
)
_mode_at = find_name(
    "torch._C._get_dispatch_stack_at", "let selective checkpointing decide whether an op is run"
)
_HigherOrder = find_name("torch._ops.HigherOrderOperator", "recognise ops that take functions")
_Overload = find_name("torch._ops.OpOverload", "recognise ops")


NEEDED_OF_MODES = (detect_fake_mode, _num_modes, _mode_at)
"""Private names without which it cannot be told whether an op is issued."""


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
    innermost = _mode_at(num_modes - 1)
    return getattr(innermost, "_mode_key", None) is None


def is_higher_order(op: Any) -> bool:
    """Whether `op` takes functions: such ops have no packet and are no collectives."""
    return isinstance(op, _HigherOrder)


def is_overload(op: Any) -> bool:
    """Whether `op` is one overload of an op, as `aten.add.Tensor` is."""
    return isinstance(op, _Overload)


def op_packet(op: Any) -> Any:
    """The packet that `op` is an overload of: `aten.add` of `aten.add.Tensor`."""
    return op._overloadpacket


def op_schema(op: Any) -> Any:
    """The schema of `op`: its arguments with their names and types, and what it returns."""
    return op._schema


def has_fakes(args: Any) -> bool:
    """Whether the op is only tried out for its shapes: on fake tensors, or under their mode."""
    return detect_fake_mode(args) is not None
