"""A plan made definite for one program and one mesh: what lies how, by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias, final

from shardscope.parallel.placements import Placement

__all__ = ["InputPins", "Pin", "Resolved"]

Pin: TypeAlias = tuple[Placement | None, ...]
"""How a value shall lie along each mesh axis, in the mesh's order; None leaves it as it comes.

Dims may be negative, counted from the back: a plan does not know how many a value has.
"""


@final
@dataclass(frozen=True)
class InputPins:
    """How a module wants its inputs: by position, and by the names of keyword arguments."""

    positional: tuple[Pin | None, ...] = ()  # None, and what is beyond its end, is left as it is
    keyword: Mapping[str, Pin] = field(default_factory=dict)


@final
@dataclass(frozen=True)
class Resolved:
    """What the plan says, checked against the program and the mesh.

    Tensors that lie whole along every axis are left out; those with several names stand under
    each of them. Dims of tensors are counted from the front, those of pins as `Pin` says.
    """

    axes: Mapping[str, int]
    tensors: Mapping[str, tuple[Placement, ...]] = field(default_factory=dict)
    module_inputs: Mapping[str, InputPins] = field(default_factory=dict)
    module_outputs: Mapping[str, tuple[Pin | None, ...]] = field(default_factory=dict)
    inputs: Mapping[str, tuple[Placement, ...]] = field(default_factory=dict)  # by path
    outputs: Mapping[str, Pin] = field(default_factory=dict)  # by path
    rules: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """By the name of a tensor or module, the patterns of the entries that decided."""
