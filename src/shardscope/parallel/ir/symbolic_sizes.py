"""Symbolic sizes of a dynamic program, and how they are rewritten when they are sharded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol, TypeVar, final

import sympy
import torch

from shardscope._torch.export import divide_size, expression_of, hint_of, range_of
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
