"""Open sizes that are cut: each becomes so many times the size of a rank's piece."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import sympy
import torch

from shardscope.parallel.flow import Flow, Value
from shardscope.parallel.placements import Shard, Size
from shardscope.parallel.plan.resolved import Pin

__all__ = ["as_example", "cut_symbols", "divide_sizes", "open_sizes"]


def cut_symbols(pins: Iterable[tuple[Value, Pin]], sizes: tuple[int, ...]) -> dict[Any, int]:
    """Into how many pieces the plan cuts the open sizes of values."""
    cuts: dict[Any, int] = {}
    for value, pin in pins:
        for placement, num_ranks in zip(pin, sizes, strict=True):
            if isinstance(placement, Shard):
                for symbol in _symbols(value.shape[placement.dim]):
                    cuts[symbol] = max(cuts.get(symbol, 1), num_ranks)
    return cuts


def divide_sizes(flow: Flow, cuts: Mapping[Any, int]) -> None:
    """Write the open size s that is cut in n as n * s: from here on s is a piece's."""
    changes = {symbol: num_ranks * symbol for symbol, num_ranks in cuts.items()}
    if not changes:
        return
    values = [value for value, _ in flow.inputs]
    values += [value for step in flow.steps for value in step.outputs]
    for value in values:
        value.shape = tuple(_substitute(size, changes) for size in value.shape)
        value.scalar = _substitute(value.scalar, changes)


def open_sizes(flow: Flow) -> dict[Any, torch.SymInt]:
    """What export traced each open size with, where an input has it."""
    found: dict[Any, torch.SymInt] = {}
    for value, _ in flow.inputs:
        sizes = value.example.shape if value.is_tensor else [value.example]
        for size in sizes:
            if isinstance(size, torch.SymInt) and size.node.expr.is_Symbol:
                found.setdefault(size.node.expr, size)
    return found


def as_example(size: Size, known: Mapping[Any, torch.SymInt]) -> Any:
    """The size as a traced tensor has it."""
    symbols = list(_symbols(size))
    if not symbols:
        return int(size)
    return sympy.lambdify(symbols, size)(*(known[one] for one in symbols))


def _symbols(size: Any) -> set[Any]:
    return set(size.free_symbols) if isinstance(size, sympy.Expr) else set()


def _substitute(size: Any, changes: Mapping[Any, Any]) -> Any:
    return size.subs(changes) if isinstance(size, sympy.Expr) else size
