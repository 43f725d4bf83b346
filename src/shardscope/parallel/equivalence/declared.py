"""The types along mesh axes that a tensor itself declares: placements, or an annotation."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor

from shardscope._torch.mesh import axis_names
from shardscope._torch.spmd_types import read_annotation

Declared = tuple[tuple[str, str], ...]
"""Names of mesh axes with the type along each: `R`, `I`, `S(0)`, `P`, `P(avg)` or `V`."""


def read_declared(tensor: torch.Tensor) -> Declared:
    """The types that placements of a DTensor, or an annotation of spmd_types, give a tensor.

    Empty for other tensors. A dim that a placement shards within the shards of a later axis is
    sharded like any other.
    """
    if not isinstance(tensor, DTensor):
        return tuple((axis.axis, axis.type) for axis in read_annotation(tensor))
    types = []
    for axis, placement in zip(axis_names(tensor.device_mesh), tensor.placements, strict=True):
        if hasattr(placement, "dim"):  # Shard and _StridedShard
            types.append((axis, f"S({placement.dim})"))
        elif placement.is_partial():
            reduction = getattr(placement, "reduce_op", "sum")
            types.append((axis, "P" if reduction == "sum" else f"P({reduction})"))
        else:
            types.append((axis, "R"))
    return tuple(types)
