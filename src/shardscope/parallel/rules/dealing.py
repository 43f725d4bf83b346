"""Tensors dealt out to the ranks of a mesh as placements say, and put together again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from itertools import pairwise, product

import torch
from torch import Tensor

from shardscope.parallel.layouts import Layout, Seat
from shardscope.parallel.placements import (
    Partial,
    Placement,
    Reduction,
    Replicate,
    Shard,
    cut_size,
)

__all__ = ["Coordinates", "all_coordinates", "deal", "dual", "join", "piece_of"]

Coordinates = tuple[int, ...]

_COMBINE: dict[Reduction, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
}


def all_coordinates(sizes: Sequence[int]) -> list[Coordinates]:
    """Every rank of a mesh of these sizes."""
    return list(product(*map(range, sizes)))


def deal(
    whole: Tensor, *, placements: Sequence[Placement], sizes: Sequence[int]
) -> dict[Coordinates, Tensor]:
    """What each rank holds. The terms of a partial value are drawn at random."""
    dealt: dict[Coordinates, Tensor] = {(): whole}
    for placement, num_ranks in zip(placements, sizes, strict=True):
        dealt = {
            (*at, rank): one
            for at, piece in dealt.items()
            for rank, one in enumerate(_deal_along_axis(piece, placement, num_ranks))
        }
    return dealt


def piece_of(whole: Tensor, *, layout: Layout, seat: Seat) -> Tensor:
    """What one rank holds of a tensor: itself where it is whole, else a copy of the piece alone."""
    places = zip(layout.placements, seat.sizes, seat.coordinates, strict=True)
    piece = whole
    for placement, num_ranks, rank in places:
        if isinstance(placement, Shard):
            piece = _cut_one(piece, placement, num_ranks, rank)
    return whole if piece is whole else piece.clone(memory_format=torch.contiguous_format)


def join(
    pieces: Mapping[Coordinates, Tensor], *, placements: Sequence[Placement], sizes: Sequence[int]
) -> Tensor:
    """The whole again. Raises ValueError where ranks that should hold the same do not."""
    joined = dict(pieces)
    for axis in reversed(range(len(sizes))):
        joined = {
            at: _join_along_axis([joined[*at, rank] for rank in range(sizes[axis])], placement)
            for placement in [placements[axis]]
            for at in all_coordinates(sizes[:axis])
        }
    return joined[()]


def dual(placement: Placement, *, is_split: bool = True) -> Placement:
    """How the gradient lies of a value that lies so, where the computation `is_split`."""
    match placement:
        case Replicate():
            return Partial() if is_split else placement
        case Partial():
            return Replicate()
        case Shard():
            return placement


def _deal_along_axis(whole: Tensor, placement: Placement, num_ranks: int) -> list[Tensor]:
    match placement:
        case Replicate():
            return [whole] * num_ranks
        case Shard():
            return _cut(whole, placement, num_ranks)
        case Partial("sum"):
            return _addends(whole, num_ranks)
        case Partial(reduction):
            return _contenders(whole, reduction, num_ranks)


def _cut(whole: Tensor, shard: Shard, num_ranks: int) -> list[Tensor]:
    blocks = torch.split_with_sizes(whole, _block_sizes(whole.shape[shard.dim], shard), shard.dim)
    cut = [_chunks(block, shard.dim, num_ranks) for block in blocks]
    return [torch.cat(pieces, shard.dim) for pieces in zip(*cut, strict=True)]


def _cut_one(whole: Tensor, shard: Shard, num_ranks: int, rank: int) -> Tensor:
    """One rank's piece; of the others' nothing is copied, for weights are large."""
    blocks = torch.split_with_sizes(whole, _block_sizes(whole.shape[shard.dim], shard), shard.dim)
    chunks = [_chunks(block, shard.dim, num_ranks)[rank] for block in blocks]
    return chunks[0] if len(chunks) == 1 else torch.cat(chunks, shard.dim)


def _chunks(block: Tensor, dim: int, num_ranks: int) -> tuple[Tensor, ...]:
    sizes = [cut_size(block.shape[dim], num_ranks, rank) for rank in range(num_ranks)]
    return torch.split_with_sizes(block, sizes, dim)


def _block_sizes(size: int, shard: Shard) -> list[int]:
    return list(shard.segments) or [size // shard.outer] * shard.outer


def _addends(whole: Tensor, num_ranks: int) -> list[Tensor]:
    terms = [_random_like(whole) for _ in range(num_ranks - 1)]
    return [*terms, whole - sum(terms)]


def _contenders(whole: Tensor, reduction: Reduction, num_ranks: int) -> list[Tensor]:
    """Values of which the largest (or smallest) is the whole, at each place on some rank."""
    winner = torch.randint(num_ranks, whole.shape)
    return [
        torch.where(winner == rank, whole, _worse(whole, reduction)) for rank in range(num_ranks)
    ]


def _worse(whole: Tensor, reduction: Reduction) -> Tensor:
    if whole.dtype == torch.bool:
        other = torch.rand(whole.shape) < 0.5
        return whole & other if reduction == "max" else whole | other
    loss = _random_like(whole).abs()
    return whole - loss if reduction == "max" else whole + loss


def _random_like(whole: Tensor) -> Tensor:
    """Numbers with few digits: taken away and added again, they leave no rounding behind."""
    if whole.is_complex():
        return torch.complex(_random_like(whole.real), _random_like(whole.imag))
    eighths = torch.randint(-20, 21, whole.shape)
    return (eighths / 8).to(whole.dtype) if whole.is_floating_point() else eighths.to(whole.dtype)


def _join_along_axis(pieces: list[Tensor], placement: Placement) -> Tensor:
    match placement:
        case Replicate():
            for one, other in pairwise(pieces):
                if not torch.allclose(one, other, equal_nan=True):
                    raise ValueError("ranks that should hold the same value hold different ones")
            return pieces[0]
        case Shard():
            return _put_together(pieces, placement)
        case Partial(reduction):
            return reduce(_COMBINE[reduction], pieces)


def _put_together(pieces: list[Tensor], shard: Shard) -> Tensor:
    dim, num_ranks = shard.dim, len(pieces)
    size = sum(piece.shape[dim] for piece in pieces)
    blocks = _block_sizes(size, shard)
    cut = [
        torch.split_with_sizes(piece, [cut_size(one, num_ranks, rank) for one in blocks], dim)
        for rank, piece in enumerate(pieces)
    ]
    return torch.cat([one for block in zip(*cut, strict=True) for one in block], dim)
