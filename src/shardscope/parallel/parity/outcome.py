"""What one run of a model gave: outputs, gradients, changed buffers, all as whole tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from types import SimpleNamespace
from typing import Any, final

import torch

from shardscope.record import Source, TensorKind

__all__ = ["Key", "Outcome", "named_tensors", "tie_names"]

Key = tuple[TensorKind, str]


@final
@dataclass(frozen=True, eq=False)
class Outcome:
    """Tensors by name, whole, wherever they were computed.

    Parameters without a gradient are left out. Tied parameters have an entry for each name, with
    one tensor. `buffers` has all of them, `changed` names those that the run changed. `absent` are
    parameters that this rank does not have at all, as other ranks' experts. `seen` is what modules
    put out on the way, where someone looked.
    """

    outputs: list[tuple[str, torch.Tensor]]
    gradients: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]
    changed: frozenset[str] = frozenset()
    absent: frozenset[str] = frozenset()
    parameters: dict[str, torch.Tensor] = field(default_factory=dict)  # before the run
    seen: dict[str, torch.Tensor] = field(default_factory=dict)
    sources: dict[str, Source] = field(default_factory=dict)  # lines behind what was seen

    def tensors(self) -> dict[Key, torch.Tensor]:
        """All of them by kind and name."""
        named: dict[Key, torch.Tensor] = {}
        for name, tensor in self.outputs:
            named[TensorKind.OUTPUT, name] = tensor
        for name, tensor in self.gradients.items():
            named[TensorKind.GRADIENT, name] = tensor
        for name, tensor in self.buffers.items():
            named[TensorKind.BUFFER, name] = tensor
        return named


def named_tensors(value: Any, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors in a model's output with where they are in it, as `[0].logits`."""
    if isinstance(value, torch.Tensor):
        yield path, value
        return
    for place, item in _items(value):
        yield from named_tensors(item, path + place)


def _items(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        yield from ((f"[{key!r}]", item) for key, item in value.items())
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        yield from ((f".{name}", getattr(value, name)) for name in value._fields)
    elif isinstance(value, list | tuple):
        yield from ((f"[{index}]", item) for index, item in enumerate(value))
    elif is_dataclass(value) and not isinstance(value, type):
        yield from ((f".{one.name}", getattr(value, one.name)) for one in fields(value))
    elif isinstance(value, SimpleNamespace):
        yield from ((f".{name}", item) for name, item in vars(value).items())


def tie_names(named: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """For each name, the first that has the very same tensor."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(tensor), name) for name, tensor in named.items()}
