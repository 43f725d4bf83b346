"""What each rank holds of a tensor that lies on a mesh, cut from the whole."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

__all__ = ["cut_piece", "is_cut", "is_cuttable"]

_REDUCTIONS = ("sum", "avg", "max", "min", "product")


def is_cuttable(placement: Placement) -> bool:
    """Whether pieces can be made: not of subclasses, which know more than their fields say."""
    if type(placement) is Partial:
        return placement.reduce_op in _REDUCTIONS
    return is_cut(placement)


def is_cut(placement: Placement) -> bool:
    """Whether pieces are cut from the whole as they are: nothing need be added up."""
    return type(placement) in (Replicate, Shard)


def cut_piece(
    whole: torch.Tensor, placements: Sequence[Placement], position: Sequence[tuple[int, int]]
) -> torch.Tensor:
    """The piece of a rank that is the `n`-th of `m` on each axis."""
    piece = whole
    for placement, (number, num_ranks) in zip(placements, position, strict=False):
        if isinstance(placement, Shard):
            chunks = piece.chunk(num_ranks, placement.dim)
            missing = piece.narrow(placement.dim, 0, 0)
            piece = chunks[number] if number < len(chunks) else missing
        elif isinstance(placement, Partial):
            piece = _cut_part(piece, placement.reduce_op, number, num_ranks)
    return piece


def _cut_part(whole: torch.Tensor, reduce_op: str, number: int, num_ranks: int) -> torch.Tensor:
    """Parts of which none is the whole, and some have the other sign: no op may be blind to it."""
    if reduce_op in ("max", "min"):
        step = number if reduce_op == "min" else -number
        return whole + step if whole.dtype is not torch.bool else whole
    if reduce_op == "product":
        return whole if number == 0 else torch.ones_like(whole)
    shift = -(num_ranks - 1) if number == 0 else 1
    factor = num_ranks if reduce_op == "avg" else 1
    own = whole * factor if number == 0 else torch.zeros_like(whole)
    return own - shift * factor
