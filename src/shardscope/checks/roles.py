"""Which ranks to run, so that each rank of a large world has one that does the same.

All of few ranks; of many, each stage of a pipeline, the first, second and last rank along each
other axis, and the corners of the mesh.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import final

from shardscope.hang import P2P_KINDS
from shardscope.launch.request import Lanes
from shardscope.record import Axis, Recording

FEW_RANKS = 8
"""How many ranks a world may have for each to be run."""


@final
class Roles:
    """The ranks of a world that are run, and which of them stands for any rank."""

    def __init__(self, size: int, axes: Sequence[Axis], pipelines: Iterable[str]) -> None:
        sizes = [axis.size for axis in axes]
        if math.prod(sizes) != size:  # several meshes, or none
            axes, sizes = (), [size]
        self._sizes = sizes
        self._pipelines = {i for i, axis in enumerate(axes) if axis.name in set(pipelines)}
        self.ranks = tuple(range(size)) if size <= FEW_RANKS else tuple(sorted(self._list_ranks()))
        self._known = set(self.ranks)

    @property
    def lanes(self) -> Lanes | None:
        """The ranks of pipelines' stages that send objects for all others; None if all are run."""
        if not self._pipelines or len(self.ranks) == math.prod(self._sizes):
            return None
        return Lanes(tuple(self._sizes), tuple(sorted(self._pipelines)))

    def find_representative(self, rank: int) -> int:
        """The rank that is run and does what this rank does."""
        if rank in self._known:
            return rank
        position = self._locate(rank)
        nearest = [self._round(axis, index) for axis, index in enumerate(position)]
        candidates = (nearest, self._move(nearest, 1), self._move(nearest, 0))
        numbers = (self._number(candidate) for candidate in candidates)
        return next((number for number in numbers if number in self._known), self.ranks[0])

    def list_represented(self, size: int) -> dict[int, list[int]]:
        """For each rank that is run, the ranks that it stands for."""
        represented: dict[int, list[int]] = {rank: [] for rank in self.ranks}
        for rank in range(size):
            represented[self.find_representative(rank)].append(rank)
        return represented

    def _list_ranks(self) -> set[int]:
        ends = [dict.fromkeys((0, size - 1)) for size in self._sizes]
        ranks = {self._number(corner) for corner in itertools.product(*ends)}
        for axis, size in enumerate(self._sizes):
            positions = range(size) if axis in self._pipelines else (1, size - 1)
            for index in positions:
                position = [0] * len(self._sizes)
                position[axis] = min(index, size - 1)
                ranks.add(self._number(position))
        return ranks

    def _move(self, position: Sequence[int], largest: int) -> list[int]:
        """A position with no index above `largest` along axes that are no pipeline."""
        return [
            index if axis in self._pipelines else min(index, largest)
            for axis, index in enumerate(position)
        ]

    def _round(self, axis: int, index: int) -> int:
        last = self._sizes[axis] - 1
        return index if axis in self._pipelines or index in (0, last) else 1

    def _locate(self, rank: int) -> list[int]:
        position = []
        for size in reversed(self._sizes):
            rank, index = divmod(rank, size)
            position.append(index)
        return position[::-1]

    def _number(self, position: Sequence[int]) -> int:
        number = 0
        for size, index in zip(self._sizes, position, strict=True):
            number = number * size + index
        return number


def read_roles(recording: Recording) -> Roles:
    """The roles of the ranks of a program, as the recording of rank 0 shows them."""
    run = recording.run
    pipelines = {
        call.axis for call in recording.collectives if call.kind in P2P_KINDS and call.axis
    }
    return Roles(run.world_size, run.axes, pipelines)
