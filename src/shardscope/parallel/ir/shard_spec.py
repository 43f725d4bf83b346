"""The shape and placements of a tensor on a mesh (`ShardSpec`), and real tensors sharded by them.

`ShardSpec` says what each rank's local shape is; `shard_tensor`, `local_shard` and `unshard_tensor`
shard a tensor for the ranks, or for one of them, and restore the full tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import pairwise, product
from typing import final

import torch
from torch import Tensor

from shardscope.plan.placements import (
    Partial,
    Placement,
    Reduction,
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


Coordinates = tuple[int, ...]

_COMBINE: dict[Reduction, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
}


def all_coordinates(sizes: Sequence[int]) -> list[Coordinates]:
    """The coordinates of every rank of a mesh of these sizes."""
    return list(product(*map(range, sizes)))


def shard_tensor(
    full_tensor: Tensor, *, placements: Sequence[Placement], sizes: Sequence[int]
) -> dict[Coordinates, Tensor]:
    """The local tensor of every rank. The terms of a Partial placement are random."""
    shards: dict[Coordinates, Tensor] = {(): full_tensor}
    for placement, num_ranks in zip(placements, sizes, strict=True):
        shards = {
            (*at, rank): shard
            for at, parent in shards.items()
            for rank, shard in enumerate(_shard_along_axis(parent, placement, num_ranks))
        }
    return shards


def local_shard(full_tensor: Tensor, *, spec: ShardSpec, coordinate: MeshCoordinate) -> Tensor:
    """One rank's local tensor: `full_tensor` itself if it is replicated, else a contiguous copy of
    the shard.
    """
    axes = zip(spec.placements, coordinate.sizes, coordinate.coordinates, strict=True)
    shard = full_tensor
    for placement, num_ranks, rank in axes:
        if isinstance(placement, Shard):
            shard = _split_shard(shard, placement, num_ranks, rank)
    return (
        full_tensor if shard is full_tensor else shard.clone(memory_format=torch.contiguous_format)
    )


def unshard_tensor(
    shards: Mapping[Coordinates, Tensor], *, placements: Sequence[Placement], sizes: Sequence[int]
) -> Tensor:
    """The full tensor of the ranks' shards. Raises ValueError where replicated shards differ."""
    parts = dict(shards)
    for axis in reversed(range(len(sizes))):
        parts = {
            at: _unshard_along_axis([parts[*at, rank] for rank in range(sizes[axis])], placement)
            for placement in [placements[axis]]
            for at in all_coordinates(sizes[:axis])
        }
    return parts[()]


def grad_placement(placement: Placement, *, is_split: bool = True) -> Placement:
    """The placement of the gradient of a value with this placement.

    `is_split` is whether the ranks of the axis compute different parts of the result.
    """
    match placement:
        case Replicate():
            return Partial() if is_split else placement
        case Partial():
            return Replicate()
        case Shard():
            return placement


def _shard_along_axis(full_tensor: Tensor, placement: Placement, num_ranks: int) -> list[Tensor]:
    match placement:
        case Replicate():
            return [full_tensor] * num_ranks
        case Shard():
            return _split_shards(full_tensor, placement, num_ranks)
        case Partial("sum"):
            return _random_terms(full_tensor, num_ranks)
        case Partial(reduction):
            return _random_candidates(full_tensor, reduction, num_ranks)


def _split_shards(full_tensor: Tensor, shard: Shard, num_ranks: int) -> list[Tensor]:
    blocks = torch.split_with_sizes(
        full_tensor, _block_sizes(full_tensor.shape[shard.dim], shard), shard.dim
    )
    chunks = [_chunks(block, shard.dim, num_ranks) for block in blocks]
    return [torch.cat(parts, shard.dim) for parts in zip(*chunks, strict=True)]


def _split_shard(full_tensor: Tensor, shard: Shard, num_ranks: int, rank: int) -> Tensor:
    """One rank's shard. The shards of other ranks are not copied, because weights are large."""
    blocks = torch.split_with_sizes(
        full_tensor, _block_sizes(full_tensor.shape[shard.dim], shard), shard.dim
    )
    chunks = [_chunks(block, shard.dim, num_ranks)[rank] for block in blocks]
    return chunks[0] if len(chunks) == 1 else torch.cat(chunks, shard.dim)


def _chunks(block: Tensor, dim: int, num_ranks: int) -> tuple[Tensor, ...]:
    sizes = [shard_size(block.shape[dim], num_ranks, rank) for rank in range(num_ranks)]
    return torch.split_with_sizes(block, sizes, dim)


def _block_sizes(size: int, shard: Shard) -> list[int]:
    return list(shard.segments) or [size // shard.outer] * shard.outer


def _random_terms(full_tensor: Tensor, num_ranks: int) -> list[Tensor]:
    """Random tensors, one for each rank, whose sum is the full tensor."""
    partials = [_random_like(full_tensor) for _ in range(num_ranks - 1)]
    return [*partials, full_tensor - sum(partials)]


def _random_candidates(full_tensor: Tensor, reduction: Reduction, num_ranks: int) -> list[Tensor]:
    """Random tensors whose maximum (or minimum) is the full tensor; each element is attained on one
    rank.
    """
    winner = torch.randint(num_ranks, full_tensor.shape)
    return [
        torch.where(winner == rank, full_tensor, _random_losers(full_tensor, reduction))
        for rank in range(num_ranks)
    ]


def _random_losers(full_tensor: Tensor, reduction: Reduction) -> Tensor:
    """Random values that are not larger (for "max") or not smaller (for "min") than the full
    tensor.
    """
    if full_tensor.dtype == torch.bool:
        mask = torch.rand(full_tensor.shape) < 0.5
        return full_tensor & mask if reduction == "max" else full_tensor | mask
    loss = _random_like(full_tensor).abs()
    return full_tensor - loss if reduction == "max" else full_tensor + loss


def _random_like(full_tensor: Tensor) -> Tensor:
    """Random numbers with few digits, so that subtracting and adding them again leaves no rounding
    error.
    """
    if full_tensor.is_complex():
        return torch.complex(_random_like(full_tensor.real), _random_like(full_tensor.imag))
    eighths = torch.randint(-20, 21, full_tensor.shape)
    return (
        (eighths / 8).to(full_tensor.dtype)
        if full_tensor.is_floating_point()
        else eighths.to(full_tensor.dtype)
    )


def _unshard_along_axis(shards: list[Tensor], placement: Placement) -> Tensor:
    match placement:
        case Replicate():
            for previous, following in pairwise(shards):
                if not torch.allclose(previous, following, equal_nan=True):
                    raise ValueError("ranks that should hold the same value hold different ones")
            return shards[0]
        case Shard():
            return _concatenate_shards(shards, placement)
        case Partial(reduction):
            return reduce(_COMBINE[reduction], shards)


def _concatenate_shards(tensors: list[Tensor], shard: Shard) -> Tensor:
    dim, num_ranks = shard.dim, len(tensors)
    size = sum(tensor.shape[dim] for tensor in tensors)
    blocks = _block_sizes(size, shard)
    parts = [
        torch.split_with_sizes(
            tensor, [shard_size(block_size, num_ranks, rank) for block_size in blocks], dim
        )
        for rank, tensor in enumerate(tensors)
    ]
    return torch.cat([part for block in zip(*parts, strict=True) for part in block], dim)
