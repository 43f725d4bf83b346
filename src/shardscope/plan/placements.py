"""Placements of a value along one mesh axis (Replicate, Shard, Partial), and the text that plans
write them as, such as `shard(0)`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, final

import sympy
from torch.distributed.tensor import Partial as TorchPartial
from torch.distributed.tensor import Placement as TorchPlacement
from torch.distributed.tensor import Replicate as TorchReplicate
from torch.distributed.tensor import Shard as TorchShard

from shardscope.errors import PlanError

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


_SHARD = re.compile(
    r"shard\(\s*(?:dim\s*=\s*)?(-?\d+)\s*"
    r"(?:,\s*outer\s*=\s*(\d+)\s*|,\s*segments\s*=\s*[\[(]\s*(\d+(?:\s*,\s*\d+)*)\s*,?\s*[\])]\s*)?\)"
)
_PARTIAL = re.compile(r"partial(?:\(\s*[\"']?(sum|max|min)?[\"']?\s*\))?")
_REPLICATE = re.compile(r"replicate(?:\(\s*\))?")
_REDUCTIONS = {"sum", "max", "min"}


def is_placement(value: object) -> bool:
    """Whether it is a placement object or class, ours or torch's."""
    return isinstance(value, (Replicate, Shard, Partial, TorchPlacement)) or (
        isinstance(value, type) and issubclass(value, (Replicate, Shard, Partial, TorchPlacement))
    )


def read_placement(value: object, location: str) -> Placement:
    """Our placement for what the user wrote at `location`; raises PlanError if it is none."""
    if isinstance(value, str) and (placement := read_placement_text(value)) is not None:
        return placement
    if isinstance(value, type) and issubclass(value, (Replicate, TorchReplicate)):
        return Replicate()
    if isinstance(value, Shard):
        return _check_shard(value, location)
    if isinstance(value, (Replicate, Partial)):
        return value
    if isinstance(value, TorchPlacement):
        return _read_torch(value, location)
    raise PlanError(
        f"{location} is {_describe_value(value)}, which is not a placement. Give Shard(dim), "
        "Replicate() or "
        "Partial(), as an object or as text: 'shard(0)', 'replicate', 'partial'."
    )


def read_placement_text(text: str) -> Placement | None:
    """The placement that the text stands for, or None."""
    text = text.strip().lower()
    if match := _SHARD.fullmatch(text):
        segments = tuple(int(size) for size in re.findall(r"\d+", match[3] or ""))
        return _check_shard(Shard(int(match[1]), int(match[2] or 1), segments), repr(text))
    if match := _PARTIAL.fullmatch(text):
        reduction = match[1] or "sum"
        return Partial(reduction)  # type: ignore[arg-type]
    return Replicate() if _REPLICATE.fullmatch(text) else None


def format_placement(placement: Placement) -> str:
    """The placement as text that `read_placement_text` reads."""
    if isinstance(placement, Shard):
        return f"shard({_shard_arguments(placement)})"
    if isinstance(placement, Partial):
        return "partial" if placement.reduction == "sum" else f"partial({placement.reduction})"
    return "replicate"


def describe_placement(placement: Placement | None) -> str:
    """The placement as Python code."""
    if isinstance(placement, Shard):
        return f"Shard({_shard_arguments(placement)})"
    if isinstance(placement, Partial):
        return "Partial()" if placement.reduction == "sum" else f"Partial({placement.reduction!r})"
    return "None" if placement is None else "Replicate()"


def _shard_arguments(placement: Shard) -> str:
    if placement.segments:
        return f"{placement.dim}, segments={list(placement.segments)}"
    return f"{placement.dim}" + (f", outer={placement.outer}" if placement.outer != 1 else "")


def _read_torch(value: TorchPlacement, location: str) -> Placement:
    # By exact type: torch's subclasses (strided shards, masked partials) are internal to DTensor
    # and mean something else.
    if type(value) is TorchShard:
        return Shard(value.dim)
    if type(value) is TorchReplicate:
        return Replicate()
    if type(value) is TorchPartial and value.reduce_op in _REDUCTIONS:
        return Partial(value.reduce_op)  # type: ignore[arg-type]
    raise PlanError(
        f"{location} is {value}, which a plan does not support. Give Shard(dim), Replicate() or "
        "Partial('sum' | 'max' | 'min')."
    )


def _check_shard(shard: Shard, location: str) -> Shard:
    outer, segments = shard.outer, shard.segments
    if isinstance(shard.dim, bool) or not isinstance(shard.dim, int):
        raise PlanError(
            f"{location} shards dim {shard.dim!r}, which is not a number. Give Shard(dim)."
        )
    is_valid = isinstance(outer, int) and outer > 0 and all(size > 0 for size in segments)
    if not is_valid or (segments and outer != 1):
        raise PlanError(
            f"{location} is {describe_placement(shard)}, which has no blocks. Give a positive "
            "outer, "
            f"or positive "
            "segments without outer."
        )
    return shard


def _describe_value(value: object) -> str:
    if isinstance(value, type):
        return f"the class {value.__name__}"
    return repr(value) if isinstance(value, (str, int, float, type(None))) else type(value).__name__
