"""The original's names for the modules, parameters and buffers of a parallel model.

`parallelize` may wrap a module, move it into another container or replace it, so that its path
says little. A module or parameter that is the very object of the original keeps the original's
name wherever it is now; one that took a module's place has the name of that place.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import final

import torch
from torch import nn

from shardscope._torch.modules import named_places, own_buffers, own_parameters

__all__ = ["OriginalNames"]


@final
class OriginalNames:
    """Remembers a model before it is sharded; `renamed` are module names to use for others."""

    def __init__(self, model: nn.Module, renamed: Mapping[str, str] | None = None) -> None:
        self._renamed = dict(renamed or {})
        # With the objects themselves, so that an identity stays one object's alone.
        self._modules: dict[int, tuple[nn.Module, list[str]]] = {}
        self._tensors: dict[int, tuple[torch.Tensor, list[str]]] = {}
        self.places: set[str] = set()  # of the original's modules
        self.known: set[str] = set()  # names of the original's parameters and buffers
        for place, module in named_places(model):
            self.places.add(place)
            self._modules.setdefault(id(module), (module, []))[1].append(place)
            for name, tensor in (*own_parameters(module), *own_buffers(module)):
                self._tensors.setdefault(id(tensor), (tensor, []))[1].append(_join(place, name))
                self.known.add(_join(place, name))

    def modules(self, model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        """Every module of the parallel model under the original's name; wrappers come first."""
        names: dict[str, str] = {}
        for place, module in named_places(model):
            parent, _, attribute = place.rpartition(".")
            path = _join(names.get(parent, parent), attribute) if place else ""
            path = self._renamed.get(path, path)
            _, own = self._modules.get(id(module), (module, [path]))
            names[place] = path if path in own else own[0]
            yield names[place], module

    def parameters(self, model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
        """Every parameter of the parallel model under each of its names."""
        for place, module in self.modules(model):
            for name, tensor in own_parameters(module):
                yield self._name(_join(place, name), tensor), tensor

    def buffers(self, model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
        """Every buffer of the parallel model under each of its names."""
        for place, module in self.modules(model):
            for name, tensor in own_buffers(module):
                yield self._name(_join(place, name), tensor), tensor

    def _name(self, path: str, tensor: torch.Tensor) -> str:
        """By its place, or, where the original has no such place, by what it was there."""
        if path in self.known or id(tensor) not in self._tensors:
            return path
        return self._tensors[id(tensor)][1][0]


def _join(place: str, name: str) -> str:
    return f"{place}.{name}".lstrip(".")
