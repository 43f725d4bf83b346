"""Tensors that stand in for a model's own, one for each, so that tied weights stay tied."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import torch
from torch import nn
from torch.distributed.tensor import DTensor

__all__ = ["Make", "StandIns", "empty_like", "map_tensors"]

Make = Callable[[torch.Tensor], torch.Tensor]


@final
class StandIns:
    """Makes one stand-in for each tensor; a parameter's is a parameter."""

    def __init__(self, make: Make) -> None:
        self._make = make
        # With the tensor itself, which keeps its identity its own.
        self._made: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The stand-in for `tensor`."""
        if id(tensor) not in self._made:
            self._made[id(tensor)] = (tensor, self._dress(tensor, self._make(tensor)))
        return self._made[id(tensor)][1]

    @staticmethod
    def _dress(tensor: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(made, requires_grad=tensor.requires_grad)
        return made.requires_grad_() if tensor.requires_grad else made


def map_tensors(value: Any, change: Make) -> Any:
    """Arguments of a model with other tensors in place of theirs."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, dict):
        changed = {key: map_tensors(item, change) for key, item in value.items()}
        return changed if type(value) is dict else _like(value, changed)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(item, change) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(map_tensors(item, change) for item in value)
    return value


def _like(value: dict[Any, Any], changed: dict[Any, Any]) -> Any:
    made = value.copy()
    made.update(changed)
    return made


def empty_like(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor with the sizes and placements of `tensor` and nothing in it."""
    if isinstance(tensor, DTensor):
        local = empty_like(tensor.to_local().detach(), device)
        return DTensor.from_local(
            local,
            tensor.device_mesh,
            tensor.placements,
            run_check=False,
            shape=tensor.shape,
            stride=tensor.stride(),
        ).detach()
    if tensor.layout is not torch.strided:
        return tensor.detach()
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
