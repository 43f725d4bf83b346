"""The functional collectives: ops that name their group and can stand in a graph."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from shardscope._torch.calls import process_group
from shardscope._torch.dispatch import is_overload
from shardscope._torch.graph_nodes import is_packet
from shardscope._torch.private import find_name

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

# Torch defines the ops' kernels for tensors without data when this is loaded.
find_name("torch.distributed._functional_collectives", "trace collectives without a process group")


def _find_op(name: str) -> Any:
    op = f"torch.ops._c10d_functional.{name}.default"
    return find_name(op, "insert collectives into programs")


ALL_REDUCE = _find_op("all_reduce")
ALL_GATHER = _find_op("all_gather_into_tensor")
REDUCE_SCATTER = _find_op("reduce_scatter_tensor")
ALL_TO_ALL = _find_op("all_to_all_single")
WAIT = _find_op("wait_tensor")

# The ops, those that autograd knows more of, those of older graphs, and DTensor's own.
_NAMESPACES = ("_c10d_functional", "_c10d_functional_autograd", "c10d_functional", "_dtensor")

_COLLECTIVES = (ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL)


def is_collective(op: Any) -> bool:
    """Whether the op is one of those above that talk to other ranks."""
    return op in _COLLECTIVES


def talking_overload(target: Any) -> Any | None:
    """The op that a node's target is, if it talks to other ranks or waits for what they said.

    Dynamo's graphs name the packet of which the overload is the only one.
    """
    if is_packet(target):
        target = getattr(target, "default", None)
    is_talking = is_overload(target) and target.namespace in _NAMESPACES
    return target if is_talking else None


def size_and_rank(group: Any) -> tuple[int, int] | None:
    """How many ranks a group has, and which of them this process is; None if nobody knows it."""
    try:
        found = process_group(group)
    except (RuntimeError, ValueError, LookupError):
        return None
    return (found.size(), found.rank()) if isinstance(found, dist.ProcessGroup) else None
