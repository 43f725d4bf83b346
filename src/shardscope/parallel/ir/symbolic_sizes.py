"""Symbolic sizes that are sharded: each becomes a multiple of the size of a rank's shard."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, final

import sympy
import torch

from shardscope._torch.export import divide_size, expression_of, hint_of, range_of
from shardscope.plan.placements import Shard, Size, divides


@final
@dataclass
class OpenSizes:
    """The symbolic sizes of a program, by their symbols.

    A size s that is sharded over n ranks is rewritten as n * t, where t is the size of a shard.
    """

    known: dict[Any, torch.SymInt] = field(default_factory=dict)
    changes: dict[Any, Any] = field(default_factory=dict)
    ranges: dict[Any, Any] = field(
        default_factory=dict
    )  # of the sizes of shards, before anything is traced

    def learn(self, example: Any) -> None:
        """Record the symbols in the example that export traced an input with."""
        sizes = example.shape if isinstance(example, torch.Tensor) else [example]
        for size in sizes:
            expression = expression_of(size)
            symbols = list(symbols_in(expression))
            if isinstance(size, torch.SymInt) and len(symbols) == 1:
                factor = sympy.cancel(expression / symbols[0])
                if factor.is_Integer:
                    self.known.setdefault(symbols[0], size // int(factor))

    def shard(self, symbol: Any, num_ranks: int) -> None:
        """Rewrite the size as `num_ranks` times the size of a shard from here on."""
        shard_size = divide_size(self.known[symbol], num_ranks)
        self.known[expression_of(shard_size)] = shard_size
        self.ranges[expression_of(shard_size)] = range_of(shard_size)
        self.changes[symbol] = num_ranks * expression_of(shard_size)

    def of(self, size: Any) -> Any:
        """The size expressed in sizes of shards."""
        return size.subs(self.changes) if isinstance(size, sympy.Expr) else size

    def example(self, size: Size) -> Any:
        """The size as the SymInt (or int) that traced tensors have."""
        symbols = list(symbols_in(size))
        if not symbols:
            return int(size)
        return sympy.lambdify(symbols, size)(*(self.known[symbol] for symbol in symbols))

    @property
    def hints(self) -> dict[Any, int]:
        """The concrete sizes that the program was traced with, for comparing costs."""
        return {symbol: hint_of(size) for symbol, size in self.known.items()}


def find_sharded_symbols(
    module_constraints: Iterable[tuple[tuple[Size, ...], Iterable[Any]]], sizes: tuple[int, ...]
) -> Mapping[Any, int]:
    """The number of shards of each symbolic size that is sharded.

    `module_constraints` are shapes, each with a placement per axis; `sizes` are the mesh's.
    """
    num_shards: dict[Any, int] = {}
    for shape, placements in module_constraints:
        for placement, num_ranks in zip(placements, sizes, strict=True):
            if isinstance(placement, Shard) and not divides(num_ranks, shape[placement.dim]):
                for symbol in symbols_in(shape[placement.dim]):
                    num_shards[symbol] = max(num_shards.get(symbol, 1), num_ranks)
    return num_shards


def symbols_in(size: Any) -> set[Any]:
    """The symbols of a size."""
    return set(size.free_symbols) if isinstance(size, sympy.Expr) else set()
