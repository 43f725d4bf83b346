"""Functional collectives: ops that take their group by name and can be nodes of a graph."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from shardscope._torch.collectives.schema import process_group
from shardscope._torch.dispatch import is_overload
from shardscope._torch.graph import is_packet
from shardscope._torch.private import find_name

# Loading it registers the ops' kernels for tensors without data.
find_name("torch.distributed._functional_collectives", "trace collectives without a process group")


def _find_op(name: str) -> Any:
    op = f"torch.ops._c10d_functional.{name}.default"
    return find_name(op, "insert collectives into programs")


ALL_REDUCE = _find_op("all_reduce")
ALL_GATHER = _find_op("all_gather_into_tensor")
REDUCE_SCATTER = _find_op("reduce_scatter_tensor")
ALL_TO_ALL = _find_op("all_to_all_single")
WAIT = _find_op("wait_tensor")

# Namespaces of the ops, of their differentiable variants, of older graphs, and of DTensor.
_NAMESPACES = ("_c10d_functional", "_c10d_functional_autograd", "c10d_functional", "_dtensor")

_COLLECTIVES = (ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL)


def is_collective(op: Any) -> bool:
    """Whether `op` is one of the four functional collectives above."""
    return op in _COLLECTIVES


def as_collective_overload(target: Any) -> Any | None:
    """The overload of a node's target if it is a collective or waits for one, else None.

    Dynamo's graphs name the packet, whose only overload is the default one.
    """
    if is_packet(target):
        target = getattr(target, "default", None)
    is_collective_op = is_overload(target) and target.namespace in _NAMESPACES
    return target if is_collective_op else None


def size_and_rank(group: Any) -> tuple[int, int] | None:
    """The size of a group and this process's rank in it; None if there is no such group."""
    try:
        resolved = process_group(group)
    except (RuntimeError, ValueError, LookupError):
        return None
    return (resolved.size(), resolved.rank()) if isinstance(resolved, dist.ProcessGroup) else None
