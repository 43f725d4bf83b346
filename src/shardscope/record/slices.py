"""Records of `visualize_sharding`: which rank holds which slice of a tensor."""

from __future__ import annotations

from collections.abc import Sequence

from shardscope.record.base import Record
from shardscope.record.ranks import Natural, RankSpan
from shardscope.record.source import Axis

Stretches = tuple[tuple[Natural, Natural], ...]
"""Indices along one dim, each stretch from its first to before its second; most often one."""


class Slice(Record, frozen=True, kw_only=True, gc=False):
    """A part of a tensor, and the ranks that hold it; several if it is replicated."""

    ranks: tuple[RankSpan, ...]
    stretches: tuple[Stretches, ...]  # one for each dim


class TensorLayout(Record, frozen=True, kw_only=True, gc=False):
    """The layout of a tensor on a mesh; `slices` are in the order of the mesh's ranks."""

    name: str
    shape: tuple[Natural, ...]
    axes: tuple[Axis, ...]
    placements: tuple[str, ...]
    slices: tuple[Slice, ...]


def cut_stretches(held: Stretches, num_parts: int, part: int) -> Stretches:
    """Split index ranges as `torch.chunk` does, and return one part; `((0, 0),)` is empty.

    Args:
        held: Index ranges, each `(first, after the last)`.
        num_parts: The number of parts.
        part: Which part, from 0.

    Examples:
        >>> cut_stretches(((0, 8),), 4, 1)
        ((2, 4),)
    """
    size = sum(stop - start for start, stop in held)
    length = -(-size // num_parts)
    first, last = min(size, part * length), min(size, (part + 1) * length)
    ranges, position = [], 0
    for start, stop in held:
        low = max(first, position) - position + start
        high = min(last, position + stop - start) - position + start
        if low < high:
            ranges.append((low, high))
        position += stop - start
    return _join(ranges)


def _join(stretches: Sequence[tuple[int, int]]) -> Stretches:
    """Merge adjacent ranges; no range at all becomes an empty one."""
    joined: list[tuple[int, int]] = []
    for start, stop in stretches:
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    return tuple(joined) or ((0, 0),)
