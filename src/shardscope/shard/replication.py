"""How to go on where an op cannot be run on DTensors: with every input whole."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate

from shardscope._torch.dispatch import op_schema
from shardscope._torch.fakes import NO_DATA
from shardscope.shard.outputs import tensors_in
from shardscope.shard.stand_ins import map_tensors

__all__ = ["run_somehow"]


def run_somehow(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run the op; where DTensor refuses, on tensors of the global shapes, without data.

    That it refuses is found again, and told, when the call is judged.
    """
    try:
        return op(*args, **kwargs)
    except NO_DATA:
        raise
    except Exception:
        placed = [one for one in tensors_in((args, kwargs)) if isinstance(one, DTensor)]
        if not placed:
            raise
        try:
            result = op(*map_tensors(args, _empty), **map_tensors(kwargs, _empty))
        except Exception:  # noqa: BLE001 - then it is not DTensor's fault
            result = NotImplemented
        if result is NotImplemented:
            raise
    if op_schema(op).is_mutable:
        return args[0]
    mesh = placed[0].device_mesh
    whole = [Replicate() for _ in range(mesh.ndim)]
    return map_tensors(result, lambda one: DTensor.from_local(one, mesh, whole, run_check=False))


def _empty(tensor: torch.Tensor) -> torch.Tensor:
    if not isinstance(tensor, DTensor):
        return tensor
    device = tensor.to_local().device
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
