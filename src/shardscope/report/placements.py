"""What placements say: which dim of a tensor an axis of the mesh cuts, in numbers and in words."""

from __future__ import annotations

import re
from collections.abc import Sequence

from msgspec import Struct

__all__ = ["Cut", "describe_cuts", "order_cuts", "read_cuts"]

# As recordings write them (Shard(0), StridedShard(0)), as torch prints them (Shard(dim=0)), and as
# a parallel program does (S(0)).
_SHARD = re.compile(r"(_?Strided)?S(?:hard)?\((?:dim=)?(-?\d{1,9})\b")
_WORDS = {1: ("elements",), 2: ("rows", "columns")}


class Cut(Struct, frozen=True):
    """What lies along one axis; `dim` is None where it cuts none."""

    axis: str
    size: int  # of the axis, 0 where it is not known
    placement: str
    dim: int | None
    is_strided: bool = False  # it cuts what later axes have left


def read_cuts(
    axes: Sequence[tuple[str, int]], placements: Sequence[str], num_dims: int
) -> tuple[Cut, ...]:
    """One for each axis that has a placement."""
    cuts = []
    for (axis, size), placement in zip(axes, placements, strict=False):
        found = _SHARD.match(placement)
        dim = _find_dim(int(found[2]), num_dims) if found is not None else None
        is_strided = found is not None and found[1] is not None
        cuts.append(Cut(axis, size, placement, dim, is_strided))
    return tuple(cuts)


def _find_dim(dim: int, num_dims: int) -> int | None:
    dim = dim + num_dims if dim < 0 else dim
    return dim if 0 <= dim < num_dims else None


def order_cuts(cuts: Sequence[Cut]) -> list[Cut]:
    """Those that cut, in the order in which they do; strided ones come last, the innermost first.

    FSDP cuts after tensor parallelism but stands before it in the mesh.
    """
    plain = [cut for cut in cuts if cut.dim is not None and not cut.is_strided]
    return [*plain, *(cut for cut in reversed(cuts) if cut.dim is not None and cut.is_strided)]


def describe_cuts(cuts: Sequence[Cut], num_dims: int) -> str:
    """`rows sharded 8 ways over tp and again 16 ways over cp, replicated over dp (128)`."""
    times: dict[str, list[str]] = {}
    for cut in order_cuts(cuts):
        number = f"{cut.size:,} ways " if cut.size else ""
        times.setdefault(_name_dim(cut, num_dims), []).append(f"{number}over {cut.axis}")
    cutting = [f"{what} sharded {' and again '.join(words)}" for what, words in times.items()]
    return ", ".join([*cutting, *(_describe_whole(cut) for cut in cuts if cut.dim is None)])


def _name_dim(cut: Cut, num_dims: int) -> str:
    words = _WORDS.get(num_dims)
    return f"dim {cut.dim}" if words is None or cut.dim is None else words[cut.dim]


def _describe_whole(cut: Cut) -> str:
    number = f" ({cut.size:,})" if cut.size else ""
    if cut.placement.startswith("R"):
        return f"replicated over {cut.axis}{number}"
    if "Partial" in cut.placement or cut.placement.startswith("P"):
        return f"partial sums over {cut.axis}{number}"
    return f"{cut.placement} over {cut.axis}{number}"
