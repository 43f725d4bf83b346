"""Every tensor in what a model returns, whatever it is wrapped in."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from types import SimpleNamespace
from typing import Any

import torch

__all__ = ["differentiable", "tensors_in"]


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in tensors, mappings, lists, tuples, sets, dataclasses and namespaces."""
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
    """Those that a backward can begin at, each once."""
    found = {id(tensor): tensor for tensor in tensors_in(value) if tensor.requires_grad}
    return list(found.values())
