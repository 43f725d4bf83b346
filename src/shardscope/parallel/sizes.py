"""Sizes that a dynamic program leaves open, as one rank's program computes them."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, final

import sympy
import torch
from torch import fx

from shardscope.parallel.placements import Size
from shardscope.parallel.rules.local import LocalSize

__all__ = ["SizeBook"]

_Write = Callable[..., fx.Node]


@final
class SizeBook:
    """Knows where each open size can be read, and writes what is computed from it once."""

    def __init__(self, write: _Write) -> None:
        self._write = write
        self._known: dict[sympy.Expr, fx.Node] = {}
        self._places: dict[sympy.Symbol, tuple[fx.Node, int, int]] = {}

    def learn_shape(self, node: fx.Node, shape: tuple[Size, ...]) -> None:
        """An input of the program has this local shape: read the symbols in it there."""
        for dim, size in enumerate(shape):
            symbols = list(getattr(size, "free_symbols", ()))
            if len(symbols) == 1:
                symbol = symbols[0]
                factor = sympy.cancel(size / symbol)
                if factor.is_Integer:
                    self._places.setdefault(symbol, (node, dim, int(factor)))

    def learn(self, node: fx.Node, size: Any) -> None:
        """The node computes this size."""
        if isinstance(size, sympy.Expr):
            self._known.setdefault(size, node)

    def find(self, size: Size) -> LocalSize:
        """A size as an argument."""
        if isinstance(size, (int, sympy.Integer)):
            return int(size)
        size = sympy.cancel(size)
        if size not in self._known:
            self._known[size] = self._compute(size)
        return self._known[size]

    def _compute(self, size: sympy.Expr) -> fx.Node:
        if size.is_Symbol:
            node, dim, factor = self._places[size]
            read = self._write(torch.ops.aten.sym_size.int, node, dim)
            return read if factor == 1 else self._write(operator.floordiv, read, factor)
        above, below = sympy.fraction(sympy.together(size))
        if below != 1:
            return self._write(operator.floordiv, self.find(above), self.find(below))
        operation = operator.mul if size.is_Mul else operator.add
        assert size.is_Mul or size.is_Add or size.is_Pow, f"no way to compute the size {size}"
        if size.is_Pow:
            base, power = size.args
            return self._write(operator.pow, self.find(base), int(power))
        first, *rest = size.args
        total = self.find(first)
        for one in rest:
            total = self._write(operation, total, self.find(one))
        return total  # type: ignore[return-value]
