"""How one value lies along one mesh axis: whole on every rank, cut, or in addends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, final

import sympy

__all__ = [
    "Partial",
    "Placement",
    "Reduction",
    "Replicate",
    "Shard",
    "Size",
    "cut_size",
    "cut_start",
    "divides",
    "product",
]

Size: TypeAlias = Any
"""A size: an int, or an sympy expression of the sizes that a dynamic program leaves open."""

Reduction = Literal["sum", "max", "min"]


@final
@dataclass(frozen=True)
class Replicate:
    """Every rank of the axis holds the full value."""

    def __str__(self) -> str:
        return "R"


@final
@dataclass(frozen=True)
class Shard:
    """Each rank of the axis holds a shard along `dim`.

    The dim may be a flattened one. With `outer`, it consists of `outer` blocks, each of which is
    sharded. With `segments`, the blocks have those sizes (a fused weight of queries, keys and
    values). Uneven sizes are split as by torch.chunk.
    """

    dim: int
    outer: Size = 1
    segments: tuple[int, ...] = ()

    @property
    def is_plain(self) -> bool:
        """Whether a rank's piece is one contiguous range of the dim."""
        return self.outer == 1 and not self.segments

    def at(self, dim: int) -> Shard:
        """The same cut of another dim."""
        return Shard(dim, self.outer, self.segments)

    def __str__(self) -> str:
        blocks = self.segments or (f"{self.outer}x" if self.outer != 1 else "")
        return f"S({self.dim}{', ' if blocks else ''}{blocks or ''})"


@final
@dataclass(frozen=True)
class Partial:
    """Each rank of the axis holds a partial value: the value is their sum, or their maximum."""

    reduction: Reduction = "sum"

    def __str__(self) -> str:
        return "P" if self.reduction == "sum" else f"P({self.reduction})"


Placement = Replicate | Shard | Partial


def divides(divisor: Size, size: Size) -> bool:
    """Whether `size` is a multiple of `divisor`, for every value its symbols may take."""
    if isinstance(divisor, int) and isinstance(size, int):
        return divisor != 0 and size % divisor == 0
    return bool(sympy.cancel(sympy.sympify(size) / divisor).is_integer)


def product(sizes: Sequence[Size]) -> Size:
    """Their product, 1 for none."""
    whole: Size = 1
    for size in sizes:
        whole = whole * size
    return int(whole) if isinstance(whole, (int, sympy.Integer)) else whole


def cut_size(size: int, num_ranks: int, rank: int) -> int:
    """How much of a dim the rank holds, as torch.chunk cuts: the last ranks may go empty."""
    step = -(-size // num_ranks)
    return max(0, min(step, size - step * rank))


def cut_start(size: int, num_ranks: int, rank: int) -> int:
    """Where the rank's piece begins."""
    return min(size, -(-size // num_ranks) * rank)
