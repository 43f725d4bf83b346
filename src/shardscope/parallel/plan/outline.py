"""What a plan needs to know of a program: its modules, its tensors, its inputs and outputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import final

from shardscope.parallel.placements import Size

__all__ = ["ModuleOutline", "Outline", "TensorOutline", "ValueOutline"]


@final
@dataclass(frozen=True)
class ModuleOutline:
    """A module by the name of its class and the names of the tensors that are its own."""

    type_name: str = ""  # dotted; empty where the program does not say
    parameters: tuple[str, ...] = ()
    buffers: tuple[str, ...] = ()
    bases: tuple[str, ...] = ()  # dotted names of the classes that its class is made of, if known


@final
@dataclass(frozen=True)
class TensorOutline:
    """A parameter or buffer; one that has several names stands under the first."""

    shape: tuple[Size, ...]
    is_parameter: bool = True
    aliases: tuple[str, ...] = ()  # its other names


@final
@dataclass(frozen=True)
class ValueOutline:
    """An input or output of the program; `shape` is None for what is not a tensor."""

    shape: tuple[Size, ...] | None = None
    alias: str = ""  # the name that the program's graph has for it


@final
@dataclass(frozen=True)
class Outline:
    """A program as its plan sees it. `inputs` and `outputs` are by path, in order; None: unknown.

    The path of a value nested in an argument is that argument's name and the keys that lead to
    it: `batch.ids`. Outputs have no name of their own, so theirs begins with a position or a key.
    """

    modules: Mapping[str, ModuleOutline]
    tensors: Mapping[str, TensorOutline]
    inputs: Mapping[str, ValueOutline] | None = None
    outputs: Mapping[str, ValueOutline] | None = None

    @cached_property
    def homes(self) -> dict[str, str]:
        """By every name of every tensor, the name that it stands under."""
        names = {name: name for name in self.tensors}
        for name, tensor in self.tensors.items():
            names.update(dict.fromkeys(tensor.aliases, name))
        return names

    def tensor(self, name: str) -> TensorOutline:
        """The tensor of that name, whichever of its names it is."""
        return self.tensors[self.homes[name]]

    def without_prefix(self, prefix: str) -> Outline:
        """The same with `prefix` taken off every name that has it; what wraps it gives way."""
        inside = {_strip(name, prefix) for name in self.modules if _has(name, prefix)}
        modules = {
            _strip(name, prefix): module
            for name, module in self.modules.items()
            if _has(name, prefix) or name not in inside
        }
        tensors = {
            _strip(name, prefix): replace(
                tensor, aliases=tuple(_strip(alias, prefix) for alias in tensor.aliases)
            )
            for name, tensor in self.tensors.items()
        }
        return replace(self, modules=modules, tensors=tensors)


def _has(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(f"{prefix}.")


def _strip(name: str, prefix: str) -> str:
    return name[len(prefix) + 1 :] if _has(name, prefix) else name
