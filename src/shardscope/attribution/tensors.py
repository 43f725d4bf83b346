"""Tensors inside nested values such as a model's arguments and results: list and replace them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from types import SimpleNamespace
from typing import Any, final

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardscope._torch.tree import map_tensor_leaves

Make = Callable[[torch.Tensor], torch.Tensor]


@final
class TensorSubstitution:
    """Creates one substitute per tensor with `make`; a parameter's substitute is a parameter."""

    def __init__(self, make: Make) -> None:
        self._make = make
        # By id, with the tensor itself, so that the id is not reused.
        self._substitutes: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The substitute for `tensor`, the same at every call."""
        if id(tensor) not in self._substitutes:
            self._substitutes[id(tensor)] = (
                tensor,
                self._match_requires_grad(tensor, self._make(tensor)),
            )
        return self._substitutes[id(tensor)][1]

    @staticmethod
    def _match_requires_grad(tensor: torch.Tensor, copy: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(copy, requires_grad=tensor.requires_grad)
        return copy.requires_grad_() if tensor.requires_grad else copy


def map_tensors(value: Any, change: Make) -> Any:
    """`value` with `change(tensor)` in place of each tensor in its dicts, lists and tuples."""
    return map_tensor_leaves(change, value)


def empty_like(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor without values that has the shape, strides and placements of `tensor`."""
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


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in tensors, mappings, lists, tuples, sets, dataclasses and namespaces.

    These are the containers of users' models, more than `_torch.tree` and torch's pytrees know.
    """
    if isinstance(value, torch.Tensor):
        yield value
        return
    items: Any = ()
    if isinstance(value, Mapping):
        items = value.values()
    elif isinstance(value, list | tuple | set | frozenset):
        items = value
    elif is_dataclass(value) and not isinstance(value, type):
        items = (getattr(value, field.name) for field in fields(value))
    elif isinstance(value, SimpleNamespace) or hasattr(value, "__slots__"):
        names = vars(value) if isinstance(value, SimpleNamespace) else value.__slots__
        items = (getattr(value, name, None) for name in names)
    for item in items:
        yield from tensors_in(item)


def differentiable(value: Any) -> list[torch.Tensor]:
    """The distinct tensors in `value` that require grad, from which backward can start."""
    tensors_by_id = {id(tensor): tensor for tensor in tensors_in(value) if tensor.requires_grad}
    return list(tensors_by_id.values())
