"""Open sizes that are cut: each becomes so many times the size of a rank's piece."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, final

import sympy
import torch

from shardscope._torch.programs import divide_size, expression_of, hint_of, range_of
from shardscope.parallel.placements import Shard, Size, divides

__all__ = ["OpenSizes", "find_cuts", "symbols_in"]


@final
@dataclass
class OpenSizes:
    """The sizes that a program leaves open, by their symbols.

    A size s that is cut in n is n * t from then on, t being the size of a piece.
    """

    known: dict[Any, torch.SymInt] = field(default_factory=dict)
    changes: dict[Any, Any] = field(default_factory=dict)
    ranges: dict[Any, Any] = field(default_factory=dict)  # of pieces, before anything is traced

    def learn(self, example: Any) -> None:
        """Note the symbols in what export traced an input with."""
        sizes = example.shape if isinstance(example, torch.Tensor) else [example]
        for size in sizes:
            expression = expression_of(size)
            symbols = list(symbols_in(expression))
            if isinstance(size, torch.SymInt) and len(symbols) == 1:
                factor = sympy.cancel(expression / symbols[0])
                if factor.is_Integer:
                    self.known.setdefault(symbols[0], size // int(factor))

    def cut(self, symbol: Any, num_ranks: int) -> None:
        """From here on the size is so many times that of a piece."""
        piece = divide_size(self.known[symbol], num_ranks)
        self.known[expression_of(piece)] = piece
        self.ranges[expression_of(piece)] = range_of(piece)
        self.changes[symbol] = num_ranks * expression_of(piece)

    def of(self, size: Any) -> Any:
        """A size in terms of pieces."""
        return size.subs(self.changes) if isinstance(size, sympy.Expr) else size

    def example(self, size: Size) -> Any:
        """The size as a traced tensor has it."""
        symbols = list(symbols_in(size))
        if not symbols:
            return int(size)
        return sympy.lambdify(symbols, size)(*(self.known[one] for one in symbols))

    @property
    def hints(self) -> dict[Any, int]:
        """The sizes that the program was traced with, to compare costs."""
        return {symbol: hint_of(size) for symbol, size in self.known.items()}


def find_cuts(
    pins: Iterable[tuple[tuple[Size, ...], Iterable[Any]]], sizes: tuple[int, ...]
) -> Mapping[Any, int]:
    """Into how many pieces open sizes are cut: `pins` are shapes with a placement per axis."""
    cuts: dict[Any, int] = {}
    for shape, pin in pins:
        for placement, num_ranks in zip(pin, sizes, strict=True):
            if isinstance(placement, Shard) and not divides(num_ranks, shape[placement.dim]):
                for symbol in symbols_in(shape[placement.dim]):
                    cuts[symbol] = max(cuts.get(symbol, 1), num_ranks)
    return cuts


def symbols_in(size: Any) -> set[Any]:
    """The symbols of a size."""
    return set(size.free_symbols) if isinstance(size, sympy.Expr) else set()
