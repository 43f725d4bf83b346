"""The graph that the passes work on: values, op nodes and reshards, with symbolic sizes.

Also errors that name the op they concern (`error_context`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, NoReturn, Protocol, TypeAlias, TypeVar, final

import sympy
import torch

from shardscope._torch.dispatch import OpOverload
from shardscope._torch.export import divide_size, expression_of, hint_of, range_of
from shardscope._torch.tree import leaves
from shardscope.errors import ParallelError, ShardscopeError
from shardscope.parallel.ir.shard_spec import ShardSpec
from shardscope.plan.placements import Placement, Shard, Size, divides

_T = TypeVar("_T")


class ValueRange(Protocol):
    """The values that a symbol can have, from `lower` to `upper`; torch's `ValueRanges`."""

    lower: sympy.Expr
    upper: sympy.Expr


@final
@dataclass
class SymbolicSizes:
    """The symbolic sizes of a program, by their symbols.

    A size `s` that is sharded over `n` ranks is rewritten as `n * t`, where the new symbol `t` is
    the size of a shard, so that sizes of shards are expressions without divisions.
    """

    known: dict[sympy.Symbol, torch.SymInt] = field(default_factory=dict)
    rewrites: dict[sympy.Symbol, sympy.Expr] = field(default_factory=dict)
    # The value ranges of the sizes of shards, as they were before ops were traced with them.
    ranges: dict[sympy.Symbol, ValueRange] = field(default_factory=dict)

    def learn(self, example: object) -> None:
        """Record the symbols of an input, from the example that export traced it with."""
        sizes = example.shape if isinstance(example, torch.Tensor) else [example]
        for size in sizes:
            expression = expression_of(size)
            symbols = list(symbols_in(expression))
            if isinstance(size, torch.SymInt) and len(symbols) == 1:
                factor = sympy.cancel(expression / symbols[0])
                if factor.is_Integer:
                    self.known.setdefault(symbols[0], size // int(factor))

    def shard(self, symbol: sympy.Symbol, num_ranks: int) -> None:
        """From here on, rewrite the size as `num_ranks` times the size of a shard."""
        shard_size = divide_size(self.known[symbol], num_ranks)
        self.known[expression_of(shard_size)] = shard_size
        self.ranges[expression_of(shard_size)] = range_of(shard_size)
        self.rewrites[symbol] = num_ranks * expression_of(shard_size)

    def rewrite(self, size: _T) -> _T:
        """The size in terms of the sizes of shards; values other than expressions are unchanged."""
        return size.subs(self.rewrites) if isinstance(size, sympy.Expr) else size

    def as_example(self, size: Size) -> int | torch.SymInt:
        """The size as traced tensors have it: an int or a SymInt."""
        symbols = list(symbols_in(size))
        if not symbols:
            return int(size)
        example: torch.SymInt = sympy.lambdify(symbols, size)(
            *(self.known[symbol] for symbol in symbols)
        )
        return example

    @property
    def hints(self) -> dict[sympy.Symbol, int]:
        """The concrete sizes that the program was traced with, for comparing costs."""
        return {symbol: hint_of(size) for symbol, size in self.known.items()}


def find_sharded_symbols(
    placed_shapes: Iterable[tuple[tuple[Size, ...], Iterable[Placement | None]]],
    mesh_sizes: tuple[int, ...],
) -> Mapping[sympy.Symbol, int]:
    """The number of shards of each symbolic size that is sharded and may not divide evenly.

    `placed_shapes` are shapes, each with a placement per mesh axis; `mesh_sizes` are the numbers of
    ranks of the axes.
    """
    num_shards: dict[sympy.Symbol, int] = {}
    for shape, placements in placed_shapes:
        for placement, num_ranks in zip(placements, mesh_sizes, strict=True):
            if isinstance(placement, Shard) and not divides(num_ranks, shape[placement.dim]):
                for symbol in symbols_in(shape[placement.dim]):
                    num_shards[symbol] = max(num_shards.get(symbol, 1), num_ranks)
    return num_shards


def symbols_in(size: object) -> set[sympy.Symbol]:
    """The symbols of a size; empty for a number or any other value."""
    return set(size.free_symbols) if isinstance(size, sympy.Expr) else set()


_numbers = itertools.count()


Op: TypeAlias = "OpOverload | Callable[..., object]"
"""What an op node calls: an overload, a higher-order op, or a function such as `operator.add`."""

Result: TypeAlias = "Value | list[Result] | None"
"""What an op node returns: a value, nested lists of values, or None."""


@final
@dataclass(frozen=True)
class Attribute:
    """An attribute of the exported program that an op takes, such as the graph of a branch."""

    name: str
    value: object


@final
@dataclass(frozen=True)
class Origin:
    """The node, op, module and source line of the user's program that an op node or a reshard
    comes from.
    """

    node: str = ""
    op: str = ""
    module: str = ""
    line: str = ""  # "model.py:12: h = self.up(x)"
    # The enclosing module calls, outermost first: a key of the call, and the module's name.
    calls: tuple[tuple[str, str], ...] = ()
    part_of: str = ""  # the op that was decomposed into this one
    # The entries of the FX node's `meta` that nodes of ranks' programs take over.
    meta: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)


@final
@dataclass(eq=False)
class Value:
    """A tensor, or a number that the program computes, such as a size.

    `placements` has an entry for each mesh axis that was propagated so far.
    """

    name: str
    shape: tuple[Size, ...] = ()
    dtype: torch.dtype | None = None  # None for a size, a bool or None
    scalar: object = None  # the size or number, for a value that is not a tensor
    example: object = None  # what export traced with: a fake tensor, a SymInt, a number
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
    def example_tensor(self) -> torch.Tensor:
        """The fake tensor that export traced with, of a value that is a tensor."""
        assert isinstance(self.example, torch.Tensor), f"{self.name} is not a tensor"
        return self.example

    @property
    def spec(self) -> ShardSpec:
        return ShardSpec(self.shape, tuple(self.placements))

    def __repr__(self) -> str:
        return f"{self.name}{list(self.shape)}" if self.is_tensor else self.name


@final
@dataclass(frozen=True)
class Strategy:
    """One choice of placements with which the op runs on each rank's local tensors, without
    communication.

    `is_permutation_invariant`: the op computes the same whichever indices of the sharded dims a
    rank holds, as long as all sharded tensors hold the same ones. Then the strategy also applies to
    shards in blocks (Shard.outer, Shard.segments). False for ops that depend on an index's position
    in the dim, such as views.
    """

    inputs: tuple[Placement, ...]
    outputs: tuple[Placement, ...]
    is_permutation_invariant: bool = True


@final
@dataclass(eq=False)
class OpNode:
    """One call of an op. Arguments are by the schema's names where the op has a schema, else by
    position; values may be in nested lists and dicts.
    """

    op: Op
    arguments: dict[str, Any]
    outputs: list[Value]  # the values in `result`
    result: Result
    origin: Origin
    is_rewritten: bool = False  # is part of a node's decomposition
    strategies: list[Strategy] = field(default_factory=list)  # one for each axis

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
    # One for each axis; None for the reshard's own axis and the axes before it.
    strategies: list[Strategy | None] = field(default_factory=list)

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
    outputs: list[tuple[object, Role]]  # a Value, or a constant
    sizes: SymbolicSizes = field(default_factory=SymbolicSizes)

    def name_values(self, inputs: Mapping[str, str], outputs: Sequence[str]) -> None:
        """Rename the roles of inputs (a mapping from names in the graph) and of outputs (in order)
        to their paths.
        """
        paths = iter(outputs)

        def rename(role: Role) -> Role:
            if role.kind == "output":
                return Role("output", next(paths, role.name))
            if role.kind in ("input", "input mutation"):
                return Role(role.kind, inputs.get(role.name, role.name))
            return role

        self.inputs = [(value, rename(role)) for value, role in self.inputs]
        self.outputs = [(item, rename(role)) for item, role in self.outputs]

    def shard_sizes(self, num_shards: Mapping[sympy.Symbol, int]) -> None:
        """Rewrite symbolic sizes that are sharded as multiples of the size of a shard.

        `num_shards` maps the symbol of each such size to the number of shards.
        """
        for symbol, num_ranks in num_shards.items():
            self.sizes.shard(symbol, num_ranks)
        inputs = [value for value, _ in self.inputs]
        outputs = [output for op_node in self.op_nodes for output in op_node.outputs]
        for value in (*inputs, *outputs):
            value.shape = tuple(self.sizes.rewrite(size) for size in value.shape)
            value.scalar = self.sizes.rewrite(value.scalar)


def values_in(nest: object) -> Iterator[Value]:
    """Every value in nested dicts, lists, tuples and slices, in order."""
    return (leaf for leaf in leaves(nest) if isinstance(leaf, Value))


def map_nest(nest: object, function: Callable[[Any], Any]) -> Any:
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
