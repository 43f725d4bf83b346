"""A program as the passes see it: values, the steps that make them, and moves between ranks."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final

import torch

from shardscope.parallel.layouts import Layout
from shardscope.parallel.placements import Placement, Size
from shardscope.parallel.symbols import OpenSizes

__all__ = [
    "Attribute",
    "Flow",
    "Move",
    "Origin",
    "Role",
    "Step",
    "Value",
    "map_nest",
    "values_in",
]

_numbers = itertools.count()


@final
@dataclass(frozen=True)
class Attribute:
    """Something that hangs on the program itself, such as the graph of a branch."""

    name: str
    thing: Any


@final
@dataclass(frozen=True)
class Origin:
    """Where in the user's program something comes from."""

    node: str = ""
    op: str = ""
    module: str = ""
    line: str = ""  # "model.py:12: h = self.up(x)"
    # The module calls around it, outermost first: what tells the call, and the module's name.
    calls: tuple[tuple[str, str], ...] = ()
    part_of: str = ""  # the op that was taken apart
    meta: Any = field(default=None, compare=False, repr=False)  # what the node carried


@final
@dataclass(eq=False)
class Value:
    """A tensor, or a size that the program computes. Placements grow, an axis at a time."""

    name: str
    shape: tuple[Size, ...] = ()
    dtype: torch.dtype | None = None  # None for a size, a bool, or nothing at all
    scalar: Any = None  # what a value that is no tensor stands for
    example: Any = None  # what export traced it with
    has_gradient: bool = False  # something that is trained goes into it
    placements: list[Placement] = field(default_factory=list)
    origin: Value | None = None  # the value that this one is, placed otherwise
    number: int = field(default_factory=lambda: next(_numbers))

    @property
    def is_tensor(self) -> bool:
        return self.dtype is not None

    @property
    def root(self) -> Value:
        """The value before any move."""
        return self if self.origin is None else self.origin

    @property
    def layout(self) -> Layout:
        return Layout(self.shape, tuple(self.placements))

    def __repr__(self) -> str:
        return f"{self.name}{list(self.shape)}" if self.is_tensor else self.name


@final
@dataclass(eq=False)
class Step:
    """One op. Arguments are by the schema's names where it has one, values in any nest of them."""

    op: Any
    arguments: dict[str, Any]
    outputs: list[Value]
    result: Any  # how the op returns them: a value, a nest of values, or None
    origin: Origin
    is_rewritten: bool = False  # stands for a piece of a node that was taken apart
    strategies: list[Any] = field(default_factory=list)  # a Strategy per axis

    @property
    def inputs(self) -> list[Value]:
        """Its tensor arguments, in order."""
        return [one for one in values_in(self.arguments) if one.is_tensor]


@final
@dataclass(eq=False)
class Move:
    """One value that changes its placement along one axis."""

    axis: int
    value: Value
    output: Value
    source: Placement
    target: Placement
    origin: Origin
    cause: str
    strategies: list[Any] = field(default_factory=list)  # a Strategy for each later axis

    @property
    def inputs(self) -> list[Value]:
        return [self.value]

    @property
    def outputs(self) -> list[Value]:
        return [self.output]


@final
@dataclass(frozen=True)
class Role:
    """What an input or output of the program is: "parameter", "buffer", "constant", "input",
    "output", "mutation" (of a buffer or an input)."""

    kind: str
    name: str = ""  # the state's name, or the path of an input or output


@final
@dataclass(eq=False)
class Flow:
    """A whole program."""

    inputs: list[tuple[Value, Role]]
    steps: list[Step | Move]
    outputs: list[tuple[Any, Role]]  # a Value, or a constant
    sizes: OpenSizes = field(default_factory=OpenSizes)

    def name_values(self, inputs: Mapping[str, str], outputs: Sequence[str]) -> None:
        """Call inputs (by their names here) and outputs (in order) by their paths."""
        by_name = ("input", "input mutation")
        paths = iter(outputs)

        def rename(role: Role) -> Role:
            if role.kind == "output":
                return Role("output", next(paths, role.name))
            return (
                Role(role.kind, inputs.get(role.name, role.name)) if role.kind in by_name else role
            )

        self.inputs = [(value, rename(role)) for value, role in self.inputs]
        self.outputs = [(item, rename(role)) for item, role in self.outputs]

    def cut_sizes(self, cuts: Mapping[Any, int]) -> None:
        """Write open sizes that are cut as multiples of their pieces'."""
        for symbol, num_ranks in cuts.items():
            self.sizes.cut(symbol, num_ranks)
        values = [value for value, _ in self.inputs]
        for value in [*values, *(one for step in self.steps for one in step.outputs)]:
            value.shape = tuple(self.sizes.of(size) for size in value.shape)
            value.scalar = self.sizes.of(value.scalar)


def values_in(nest: Any) -> Iterator[Value]:
    """Every value in a nest of dicts, lists and tuples, in order."""
    if isinstance(nest, Value):
        yield nest
    elif isinstance(nest, (list, tuple)):
        for one in nest:
            yield from values_in(one)
    elif isinstance(nest, dict):
        for one in nest.values():
            yield from values_in(one)
    elif isinstance(nest, slice):
        yield from values_in((nest.start, nest.stop, nest.step))


def map_nest(nest: Any, function: Callable[[Any], Any]) -> Any:
    """The nest with every leaf replaced by what the function makes of it."""
    if isinstance(nest, (list, tuple)):
        return [map_nest(one, function) for one in nest]
    if isinstance(nest, dict):
        return {key: map_nest(one, function) for key, one in nest.items()}
    if isinstance(nest, slice):
        return slice(*(map_nest(one, function) for one in (nest.start, nest.stop, nest.step)))
    return function(nest)
