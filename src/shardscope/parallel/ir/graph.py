"""The graph that the passes work on (values, op nodes, reshards), and errors that name the op they
concern.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, NoReturn, final

import torch

from shardscope._torch.tree import leaves
from shardscope.errors import ParallelError, ShardscopeError
from shardscope.parallel.ir.shard_spec import ShardSpec
from shardscope.parallel.ir.symbolic_sizes import OpenSizes
from shardscope.plan.placements import Placement, Size

_numbers = itertools.count()


@final
@dataclass(frozen=True)
class Attribute:
    """An object that is an attribute of the exported program, such as the graph of a branch."""

    name: str
    thing: Any


@final
@dataclass(frozen=True)
class Origin:
    """The node, op, module and source line of the user's program that something comes from."""

    node: str = ""
    op: str = ""
    module: str = ""
    line: str = ""  # "model.py:12: h = self.up(x)"
    # The enclosing module calls, outermost first: a key of the call, and the module's name.
    calls: tuple[tuple[str, str], ...] = ()
    part_of: str = ""  # the op that was decomposed
    meta: Any = field(default=None, compare=False, repr=False)  # the FX node's `meta`


@final
@dataclass(eq=False)
class Value:
    """A tensor, or a size that the program computes. `placements` has an entry for each axis that
    was propagated so far.
    """

    name: str
    shape: tuple[Size, ...] = ()
    dtype: torch.dtype | None = None  # None for a size, a bool or None
    scalar: Any = None  # the size or number, for a value that is not a tensor
    example: Any = None  # the example that export traced with
    has_gradient: bool = False  # depends on something that is trained
    placements: list[Placement] = field(default_factory=list)
    origin: Value | None = None  # the value before it was resharded
    number: int = field(default_factory=lambda: next(_numbers))

    @property
    def is_tensor(self) -> bool:
        return self.dtype is not None

    @property
    def root(self) -> Value:
        """The value before any reshard."""
        return self if self.origin is None else self.origin

    @property
    def spec(self) -> ShardSpec:
        return ShardSpec(self.shape, tuple(self.placements))

    def __repr__(self) -> str:
        return f"{self.name}{list(self.shape)}" if self.is_tensor else self.name


@final
@dataclass(eq=False)
class OpNode:
    """One call of an op. Arguments are by the schema's names where the op has a schema; values may
    be in nested lists and dicts.
    """

    op: Any
    arguments: dict[str, Any]
    outputs: list[Value]
    result: Any  # the op's return structure: a value, nested values, or None
    origin: Origin
    is_rewritten: bool = False  # is part of a node's decomposition
    strategies: list[Any] = field(default_factory=list)  # a Strategy per axis

    @property
    def inputs(self) -> list[Value]:
        """The tensor arguments, in order."""
        return [value for value in values_in(self.arguments) if value.is_tensor]


@final
@dataclass(eq=False)
class Reshard:
    """A change of one value's placement along one axis."""

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


RoleKind = Literal[
    "parameter",
    "buffer",
    "constant",
    "object",
    "token",
    "input",
    "output",
    "mutation",
    "input mutation",
    "decomposed",
]
"""Kinds of inputs, then of outputs. A mutation is the new value of a buffer, an input mutation that
of an input. In the graph of a decomposition, the outputs replace the decomposed node's results.
"""


@final
@dataclass(frozen=True)
class Role:
    """What an input or output of the program is."""

    kind: RoleKind
    name: str = ""  # the state's name, or the path of an input or output


@final
@dataclass(eq=False)
class ShardingGraph:
    """A program: its inputs, op nodes and reshards in order, outputs, and symbolic sizes."""

    inputs: list[tuple[Value, Role]]
    op_nodes: list[OpNode | Reshard]
    outputs: list[tuple[Any, Role]]  # a Value, or a constant
    sizes: OpenSizes = field(default_factory=OpenSizes)

    def name_values(self, inputs: Mapping[str, str], outputs: Sequence[str]) -> None:
        """Rename the roles of inputs (a mapping from names in the graph) and of outputs (in order)
        to their paths.
        """
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

    def shard_sizes(self, num_shards: Mapping[Any, int]) -> None:
        """Rewrite symbolic sizes that are sharded as multiples of the size of a shard.

        `num_shards` maps a symbol to the number of shards.
        """
        for symbol, num_ranks in num_shards.items():
            self.sizes.shard(symbol, num_ranks)
        values = [value for value, _ in self.inputs]
        for value in [
            *values,
            *(output for op_node in self.op_nodes for output in op_node.outputs),
        ]:
            value.shape = tuple(self.sizes.of(size) for size in value.shape)
            value.scalar = self.sizes.of(value.scalar)


def values_in(nest: Any) -> Iterator[Value]:
    """Every value in nested dicts, lists, tuples and slices, in order."""
    return (leaf for leaf in leaves(nest) if isinstance(leaf, Value))


def map_nest(nest: Any, function: Callable[[Any], Any]) -> Any:
    """Nested dicts, lists, tuples and slices with `function` applied to every leaf; tuples become
    lists.
    """
    if isinstance(nest, (list, tuple)):
        return [map_nest(item, function) for item in nest]
    if isinstance(nest, dict):
        return {key: map_nest(item, function) for key, item in nest.items()}
    if isinstance(nest, slice):
        return slice(*(map_nest(item, function) for item in (nest.start, nest.stop, nest.step)))
    return function(nest)


_REPORT = "Please report the program: this is a bug in shardscope."


def describe_origin(origin: Origin) -> str:
    """`aten.linear.default (linear_3) in layers.0.wo (model.py:12: return self.wo(x))`."""
    node = f" ({origin.node})" if origin.node else ""
    module = f" in {origin.module}" if origin.module else ""
    line = f" ({origin.line})" if origin.line else ""
    return f"{origin.op or 'the program'}{node}{module}{line}"


def raise_explained(error: Exception, fact: str, remedy: str = _REPORT) -> NoReturn:
    """Raise an error of torch's as "fact (RuntimeError: its first line). Remedy".

    Shardscope's own errors and MemoryError are raised unchanged.
    """
    if isinstance(error, (ShardscopeError, MemoryError)):
        raise error
    lines = str(error).strip().splitlines()
    quoted = f"{type(error).__name__}: {lines[0]:.200}" if lines else type(error).__name__
    raise ParallelError(f"{fact} ({quoted}). {remedy}") from error


@contextmanager
def explained(fact: str, remedy: str = _REPORT) -> Iterator[None]:
    """Context manager that raises any error inside as `raise_explained` does."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - it is raised again
        raise_explained(error, fact, remedy)


@contextmanager
def error_context(origin: Origin, what: str) -> Iterator[None]:
    """Context manager that raises any error inside with the op it concerns: "<origin> cannot be
    <what>".
    """
    try:
        yield
    except Exception as error:  # noqa: BLE001 - it is raised again
        remedy = f"Leave the module out of the plan so that its inputs stay replicated. {_REPORT}"
        raise_explained(error, f"{describe_origin(origin)} cannot be {what}", remedy)
