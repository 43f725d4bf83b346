"""The shard spec of a tensor on a mesh, and the shape and offset of one rank's shard."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from shardscope.plan.placements import (
    Placement,
    Replicate,
    Shard,
    Size,
    divides,
    shard_size,
    shard_start,
)


@final
@dataclass(frozen=True)
class MeshCoordinate:
    """The mesh's sizes, and one rank's coordinate along each axis."""

    sizes: tuple[int, ...]
    coordinates: tuple[int, ...]


@final
@dataclass(frozen=True)
class ShardSpec:
    """A tensor's global shape with its placement along each mesh axis, in the mesh's order.

    If several axes shard the same dim, the first axis shards it first and the next axis shards the
    result.
    """

    shape: tuple[Size, ...]
    placements: tuple[Placement, ...]

    @property
    def is_replicated(self) -> bool:
        return all(isinstance(placement, Replicate) for placement in self.placements)

    def local_shape(self, coordinate: MeshCoordinate) -> tuple[Size, ...]:
        """The shape of the rank's local tensor."""
        shape = list(self.shape)
        for placement, num_ranks, rank in self._shards(coordinate):
            shape[placement.dim] = _local_size(shape[placement.dim], placement, num_ranks, rank)
        return tuple(shape)

    def start(self, dim: int, coordinate: MeshCoordinate) -> int:
        """The index along `dim` at which the rank's shard begins; only for contiguous shards of
        known sizes.
        """
        start, size = 0, self.shape[dim]
        for placement, num_ranks, rank in self._shards(coordinate):
            if placement.dim == dim:
                assert placement.is_plain
                assert isinstance(size, int)
                start += shard_start(size, num_ranks, rank)
                size = shard_size(size, num_ranks, rank)
        return start

    def is_even(self, sizes: tuple[int, ...]) -> bool:
        """Whether all ranks of a mesh of these sizes hold shards of the same shape."""
        shape = list(self.shape)
        for placement, num_ranks in zip(self.placements, sizes, strict=True):
            if isinstance(placement, Shard):
                if not _is_even(shape[placement.dim], placement, num_ranks):
                    return False
                shape[placement.dim] = _local_size(shape[placement.dim], placement, num_ranks, 0)
        return True

    def _shards(self, coordinate: MeshCoordinate) -> list[tuple[Shard, int, int]]:
        axes = zip(self.placements, coordinate.sizes, coordinate.coordinates, strict=True)
        return [
            (placement, size, rank)
            for placement, size, rank in axes
            if isinstance(placement, Shard)
        ]


def _is_even(size: Size, placement: Shard, num_ranks: int) -> bool:
    if placement.segments:
        return all(segment % num_ranks == 0 for segment in placement.segments)
    return divides(placement.outer * num_ranks, size)


def _local_size(size: Size, placement: Shard, num_ranks: int, rank: int) -> Size:
    if placement.segments:
        return sum(shard_size(segment, num_ranks, rank) for segment in placement.segments)
    if isinstance(size, int) and isinstance(placement.outer, int):
        outer = placement.outer
        return outer * shard_size(size // outer, num_ranks, rank)
    return size / num_ranks  # a symbolic size is sharded only if it divides evenly
