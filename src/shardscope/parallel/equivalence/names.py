"""Names of a model's modules, parameters and buffers, and of the tensors in nested values.

Parameters and modules of a parallel model get the names that they had before sharding.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from types import SimpleNamespace
from typing import final

import torch
from torch import nn

from shardscope._torch.modules import named_modules_with_aliases, own_buffers, own_parameters


def named_tensors(value: object, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors in a nested value with their paths, such as `[0].logits`."""
    if isinstance(value, torch.Tensor):
        yield path, value
        return
    for key, item in named_items(value):
        yield from named_tensors(item, path + key)


def named_items(value: object) -> Iterator[tuple[str, object]]:
    """The items of a container with what leads to them, such as `.logits`; none of other values."""
    if isinstance(value, Mapping):
        yield from ((f"[{key!r}]", item) for key, item in value.items())
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        yield from ((f".{name}", getattr(value, name)) for name in value._fields)
    elif isinstance(value, list | tuple):
        yield from ((f"[{index}]", item) for index, item in enumerate(value))
    elif is_dataclass(value) and not isinstance(value, type):
        yield from ((f".{item.name}", getattr(value, item.name)) for item in fields(value))
    elif isinstance(value, SimpleNamespace):
        yield from ((f".{name}", item) for name, item in vars(value).items())


def tie_names(named: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """For each name, the first name of the same tensor object."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(tensor), name) for name, tensor in named.items()}


def named_parameters(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Every parameter under each of its names, without the prefixes of wrappers."""
    for module_name, module in named_modules_with_aliases(model):
        for name, parameter in own_parameters(module):
            yield f"{module_name}.{name}".lstrip("."), parameter


def named_buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Every buffer under each of its names, without the prefixes of wrappers."""
    for module_name, module in named_modules_with_aliases(model):
        for name, buffer in own_buffers(module):
            yield f"{module_name}.{name}".lstrip("."), buffer


@final
class OriginalNames:
    """The names of a model's modules and tensors before sharding, to name them after it.

    `renamed` maps module names of the parallel model to the original's.
    """

    def __init__(self, model: nn.Module, renamed: Mapping[str, str] | None = None) -> None:
        self._renamed = dict(renamed or {})
        # The objects are kept alive, so that an id is not reused.
        self._modules: dict[int, tuple[nn.Module, list[str]]] = {}
        self._tensors: dict[int, tuple[torch.Tensor, list[str]]] = {}
        self.module_names: set[str] = set()  # names of the original's modules
        self.known: set[str] = set()  # names of the original's parameters and buffers
        for module_name, module in named_modules_with_aliases(model):
            self.module_names.add(module_name)
            self._modules.setdefault(id(module), (module, []))[1].append(module_name)
            for name, tensor in (*own_parameters(module), *own_buffers(module)):
                self._tensors.setdefault(id(tensor), (tensor, []))[1].append(
                    _join(module_name, name)
                )
                self.known.add(_join(module_name, name))

    def modules(self, model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        """Every module of the parallel model under the original's name; wrappers first."""
        names: dict[str, str] = {}
        for module_name, module in named_modules_with_aliases(model):
            parent, _, attribute = module_name.rpartition(".")
            path = _join(names.get(parent, parent), attribute) if module_name else ""
            path = self._renamed.get(path, path)
            _, original_names = self._modules.get(id(module), (module, [path]))
            names[module_name] = path if path in original_names else original_names[0]
            yield names[module_name], module

    def parameters(self, model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
        """Every parameter of the parallel model under each of its names."""
        for module_name, module in self.modules(model):
            for name, tensor in own_parameters(module):
                yield self._name(_join(module_name, name), tensor), tensor

    def buffers(self, model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
        """Every buffer of the parallel model under each of its names."""
        for module_name, module in self.modules(model):
            for name, tensor in own_buffers(module):
                yield self._name(_join(module_name, name), tensor), tensor

    def _name(self, path: str, tensor: torch.Tensor) -> str:
        """The name by path, or, if the original has no such path, the tensor's original name."""
        if path in self.known or id(tensor) not in self._tensors:
            return path
        return self._tensors[id(tensor)][1][0]


def _join(module_name: str, name: str) -> str:
    return f"{module_name}.{name}".lstrip(".")
