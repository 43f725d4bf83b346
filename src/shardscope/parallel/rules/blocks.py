"""The algebra of cuts under views: which cut of the new dims is the same as one of the old.

A view lines up all indices of a tensor and folds the line anew. A cut along one dim takes pieces
out of that line: so many blocks, and the same part of each. Where a dim of the new shape begins a
block and can be cut alike, the view needs no communication.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import sympy

from shardscope.parallel.placements import Shard, Size, divides, product
from shardscope.parallel.rules.dims import can_be_cut

__all__ = ["Group", "fold", "groups_of", "quotient"]

Group = tuple[list[int], list[int]]


def groups_of(before: Sequence[Size], after: Sequence[Size]) -> Iterator[Group]:
    """Dims of the old and of the new shape that hold the same indices; dims of one are left out."""
    old = [dim for dim, size in enumerate(before) if can_be_cut(size)]
    new = [dim for dim, size in enumerate(after) if can_be_cut(size)]
    ends = _common_ends([before[dim] for dim in old], [after[dim] for dim in new])
    start = (0, 0)
    for end in ends:
        yield old[start[0] : end[0]], new[start[1] : end[1]]
        start = end


def _common_ends(before: Sequence[Size], after: Sequence[Size]) -> list[tuple[int, int]]:
    """Where both shapes have used up as many indices of the line."""
    return [
        (old, new)
        for old in range(1, len(before) + 1)
        for new in range(1, len(after) + 1)
        if _is_same(product(before[:old]), product(after[:new]))
    ]


def fold(
    cut: Shard, before: Sequence[Size], after: Sequence[Size], *, group: Group, num_ranks: int
) -> Shard | None:
    """The cut of the new shape that takes out the same indices as `cut`, a cut in this group."""
    old, new = group
    at = old.index(cut.dim)
    size = before[cut.dim]
    blocks_before = product([before[dim] for dim in old[:at]])
    rest = product([before[dim] for dim in old[at + 1 :]])
    segments = () if len(set(cut.segments)) == 1 else cut.segments
    if cut.segments and sum(cut.segments) != size:
        return None  # those of the whole dim, where an axis before has left a piece of it
    if segments:
        return _fold_segments(cut, rest, after, new, num_ranks) if at == 0 else None
    outer = len(cut.segments) or cut.outer
    if not divides(outer * num_ranks, size):
        return None
    return _begin_block(blocks_before * outer, after, new, num_ranks)


def _begin_block(
    num_blocks: Size, after: Sequence[Size], dims: Sequence[int], num_ranks: int
) -> Shard | None:
    """The dim in which a line of so many blocks is cut, if its own blocks are those."""
    passed: Size = 1
    for dim in dims:
        outer = quotient(num_blocks, passed)
        if outer is not None and divides(outer * num_ranks, after[dim]):
            return Shard(dim, outer)
        passed = passed * after[dim]
    return None


def _fold_segments(
    cut: Shard, rest: Size, after: Sequence[Size], dims: Sequence[int], num_ranks: int
) -> Shard | None:
    """Segments of unlike sizes stay segments, counted in units of what the new dim holds."""
    unit = product([after[dim] for dim in dims[1:]])
    folded = [quotient(one * rest, unit) for one in cut.segments]
    if not all(isinstance(one, int) and one % num_ranks == 0 for one in folded):
        return None
    if not all(one % num_ranks == 0 for one in cut.segments):
        return None
    return Shard(dims[0], segments=tuple(one for one in folded if isinstance(one, int)))


def quotient(size: Size, divisor: Size) -> Size | None:
    """`size / divisor`, or None if that is no whole number for every value its symbols take."""
    if not divides(divisor, size):
        return None
    if isinstance(size, int) and isinstance(divisor, int):
        return size // divisor
    whole = sympy.cancel(sympy.sympify(size) / divisor)
    return int(whole) if whole.is_Integer else whole


def _is_same(one: Size, other: Size) -> bool:
    if isinstance(one, int) and isinstance(other, int):
        return one == other
    return bool(sympy.expand(one - other) == 0)
