"""The functional collectives: ops that name their group and can stand in a graph."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

# Torch defines the ops' kernels for tensors without data when this is loaded.
import torch.distributed._functional_collectives

from shardscope._torch.calls import process_group

__all__ = [
    "ALL_GATHER",
    "ALL_REDUCE",
    "ALL_TO_ALL",
    "REDUCE_SCATTER",
    "WAIT",
    "is_collective",
    "size_and_rank",
    "talking_overload",
]

_ops = torch.ops._c10d_functional

ALL_REDUCE: Any = _ops.all_reduce.default
ALL_GATHER: Any = _ops.all_gather_into_tensor.default
REDUCE_SCATTER: Any = _ops.reduce_scatter_tensor.default
ALL_TO_ALL: Any = _ops.all_to_all_single.default
WAIT: Any = _ops.wait_tensor.default

# The ops, those that autograd knows more of, those of older graphs, and DTensor's own.
_NAMESPACES = {
    spaces.name
    for spaces in (
        torch.ops._c10d_functional,
        torch.ops._c10d_functional_autograd,
        torch.ops.c10d_functional,
        torch.ops._dtensor,
    )
}

_COLLECTIVES = (ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL)


def is_collective(op: Any) -> bool:
    """Whether the op is one of those above that talk to other ranks."""
    return op in _COLLECTIVES


def talking_overload(target: Any) -> Any | None:
    """The op that a node's target is, if it talks to other ranks or waits for what they said.

    Dynamo's graphs name the packet of which the overload is the only one.
    """
    if isinstance(target, torch._ops.OpOverloadPacket):
        target = getattr(target, "default", None)
    is_one = isinstance(target, torch._ops.OpOverload) and target.namespace in _NAMESPACES
    return target if is_one else None


def size_and_rank(group: Any) -> tuple[int, int] | None:
    """How many ranks a group has, and which of them this process is; None if nobody knows it."""
    try:
        found = process_group(group)
    except (RuntimeError, ValueError, LookupError):
        return None
    return (found.size(), found.rank()) if isinstance(found, dist.ProcessGroup) else None
