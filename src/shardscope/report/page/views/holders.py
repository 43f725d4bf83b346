"""Which ranks are where on a mesh, whose ranks are numbered along its last axis first."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import product
from typing import final

from shardscope.record import Axis, Recording, compress_ranks, format_ranks

__all__ = ["Mesh"]

_MAX_RANKS = 16_384  # that are named one by one


@final
class Mesh:
    """The axes of a run, or of a program that was cut for a mesh."""

    def __init__(self, recording: Recording, axes: Sequence[Axis]) -> None:
        self._sizes = {axis.name: axis.size for axis in axes}
        num_ranks = math.prod(self._sizes.values())
        has_all = num_ranks == recording.run.world_size and len(self._sizes) == len(axes)
        # A mesh of only some ranks may be of any of them.
        self.is_numbered = bool(axes) and has_all and num_ranks <= _MAX_RANKS
        self._group_sizes = {
            group.axis: group.num_ranks for group in recording.groups if group.axis is not None
        }

    def size(self, axis: str) -> int | None:
        """How many ranks there are along it; of a flattened one, as its group says."""
        return self._sizes.get(axis, self._group_sizes.get(axis))

    def name_holders(self, at: Mapping[str, int], *, among: Collection[int] | None = None) -> str:
        """The ranks that have these coordinates; where nobody knows which, the coordinates."""
        if not self.is_numbered or any(axis not in self._sizes for axis in at):
            return ", ".join(f"{axis} {place}" for axis, place in at.items()) or "all"
        ranks = (rank for rank in self._find(at) if among is None or rank in among)
        return format_ranks(compress_ranks(ranks))

    def find_neighbours(self, rank: int, axes: Collection[str]) -> frozenset[int] | None:
        """Ranks that differ from `rank` along these axes alone; None if that is all ranks."""
        others = [axis for axis in self._sizes if axis not in axes]
        if not self.is_numbered or not others:
            return None
        at = {}
        for axis in reversed(self._sizes):
            rank, place = divmod(rank, self._sizes[axis])
            if axis in others:
                at[axis] = place
        return frozenset(self._find(at))

    def _find(self, at: Mapping[str, int]) -> Iterator[int]:
        places = [[at[axis]] if axis in at else range(size) for axis, size in self._sizes.items()]
        for coordinate in product(*places):
            rank = 0
            for place, size in zip(coordinate, self._sizes.values(), strict=True):
                rank = rank * size + place
            yield rank
