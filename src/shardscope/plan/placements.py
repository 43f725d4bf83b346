"""Placements of a value along one mesh axis: Replicate, Shard and Partial."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, final

import sympy

Size: TypeAlias = int | sympy.Expr
"""The size of a dim: a number, or a sympy expression of the symbols of dynamic sizes."""

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

    Uneven sizes are split as by torch.chunk. With `outer`, the dim consists of that many equal
    blocks, each of which is sharded, as when a sharded dim was flattened with the dims before it.
    With `segments`, the blocks have those sizes, as in a fused weight of queries, keys and values.
    """

    dim: int
    outer: Size = 1
    segments: tuple[int, ...] = ()

    @property
    def is_plain(self) -> bool:
        """Whether a rank's shard is one contiguous range of the dim."""
        return self.outer == 1 and not self.segments

    def at(self, dim: int) -> Shard:
        """The same sharding of another dim."""
        return Shard(dim, self.outer, self.segments)

    def __str__(self) -> str:
        blocks = self.segments or (f"{self.outer}x" if self.outer != 1 else "")
        return f"S({self.dim}{', ' if blocks else ''}{blocks or ''})"


@final
@dataclass(frozen=True)
class Partial:
    """Each rank of the axis holds a term: the value is the sum, maximum or minimum of all terms."""

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
    """The product of sizes; 1 for none."""
    result: Size = 1
    for size in sizes:
        result = result * size
    return int(result) if isinstance(result, (int, sympy.Integer)) else result


def shard_size(size: int, num_ranks: int, rank: int) -> int:
    """The size of a rank's shard of a dim, split as by torch.chunk: the last ranks may get 0."""
    chunk = -(-size // num_ranks)
    return max(0, min(chunk, size - chunk * rank))


def shard_start(size: int, num_ranks: int, rank: int) -> int:
    """The index of the dim at which a rank's shard begins."""
    return min(size, -(-size // num_ranks) * rank)
