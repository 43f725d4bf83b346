"""The functional collectives: ops that name their group and can stand in a graph."""

from __future__ import annotations

from typing import Any

import torch

# Torch defines the ops' kernels for tensors without data when this is loaded.
import torch.distributed._functional_collectives

__all__ = [
    "ALL_GATHER",
    "ALL_REDUCE",
    "ALL_TO_ALL",
    "REDUCE_SCATTER",
    "WAIT",
    "is_collective",
]

_ops = torch.ops._c10d_functional

ALL_REDUCE: Any = _ops.all_reduce.default
ALL_GATHER: Any = _ops.all_gather_into_tensor.default
REDUCE_SCATTER: Any = _ops.reduce_scatter_tensor.default
ALL_TO_ALL: Any = _ops.all_to_all_single.default
WAIT: Any = _ops.wait_tensor.default

_COLLECTIVES = (ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL)


def is_collective(op: Any) -> bool:
    """Whether the op is one of those above that talk to other ranks."""
    return op in _COLLECTIVES
