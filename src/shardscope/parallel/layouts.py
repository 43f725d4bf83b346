"""How one tensor lies on a whole mesh, and what one rank of it holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from shardscope.parallel.placements import (
    Placement,
    Replicate,
    Shard,
    Size,
    cut_size,
    cut_start,
    divides,
)

__all__ = ["Layout", "Seat"]


@final
@dataclass(frozen=True)
class Seat:
    """One rank's place: the mesh's sizes, and its coordinate along each axis."""

    sizes: tuple[int, ...]
    coordinates: tuple[int, ...]


@final
@dataclass(frozen=True)
class Layout:
    """A tensor's global shape with its placement along each mesh axis, in the mesh's order.

    Where several axes cut one dim, the first axis cuts it first, and the next cuts the pieces.
    """

    shape: tuple[Size, ...]
    placements: tuple[Placement, ...]

    @property
    def is_replicated(self) -> bool:
        return all(isinstance(one, Replicate) for one in self.placements)

    def local_shape(self, seat: Seat) -> tuple[Size, ...]:
        """The shape of what the rank holds."""
        shape = list(self.shape)
        for placement, num_ranks, rank in self._cuts(seat):
            shape[placement.dim] = _local_size(shape[placement.dim], placement, num_ranks, rank)
        return tuple(shape)

    def start(self, dim: int, seat: Seat) -> int:
        """Where along `dim` the rank's piece begins; only for plain cuts of known sizes."""
        start, size = 0, self.shape[dim]
        for placement, num_ranks, rank in self._cuts(seat):
            if placement.dim == dim:
                assert placement.is_plain
                assert isinstance(size, int)
                start += cut_start(size, num_ranks, rank)
                size = cut_size(size, num_ranks, rank)
        return start

    def is_even(self, sizes: tuple[int, ...]) -> bool:
        """Whether all ranks of a mesh of these sizes hold pieces of one shape."""
        shape = list(self.shape)
        for placement, num_ranks in zip(self.placements, sizes, strict=True):
            if isinstance(placement, Shard):
                if not _is_even(shape[placement.dim], placement, num_ranks):
                    return False
                shape[placement.dim] = _local_size(shape[placement.dim], placement, num_ranks, 0)
        return True

    def _cuts(self, seat: Seat) -> list[tuple[Shard, int, int]]:
        places = zip(self.placements, seat.sizes, seat.coordinates, strict=True)
        return [(one, size, at) for one, size, at in places if isinstance(one, Shard)]


def _is_even(size: Size, placement: Shard, num_ranks: int) -> bool:
    if placement.segments:
        return all(one % num_ranks == 0 for one in placement.segments)
    return divides(placement.outer * num_ranks, size)


def _local_size(size: Size, placement: Shard, num_ranks: int, rank: int) -> Size:
    if placement.segments:
        return sum(cut_size(one, num_ranks, rank) for one in placement.segments)
    if isinstance(size, int) and isinstance(placement.outer, int):
        outer = placement.outer
        return outer * cut_size(size // outer, num_ranks, rank)
    return size / num_ranks  # an open size is cut only where it divides
