"""Plain tensors that each rank has a piece of, put together without being told how they lie."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import final

import torch

__all__ = ["Cut", "arrangements", "lines_along"]

_MAX_WAYS = 64


@final
class Cut:
    """One way in which pieces lie on the mesh: for each axis the dim that it cuts, or None."""

    def __init__(self, sizes: Sequence[int], dims: Sequence[int | None]) -> None:
        self._sizes = tuple(sizes)
        self.dims = tuple(dims)

    def join(self, pieces: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
        """What each rank's peers make up together with it; None where pieces do not fit."""
        wholes = list(pieces)
        # From the last axis to the first: where two cut one dim, the last cuts within the first.
        for axis in reversed(range(len(self._sizes))):
            dim = self.dims[axis]
            if dim is None:
                continue
            for line in lines_along(self._sizes, axis):
                parts = [wholes[rank] for rank in line]
                if not _fit(parts, dim):
                    return None
                whole = torch.cat(parts, dim)
                for rank in line:
                    wholes[rank] = whole
        return wholes


def arrangements(
    pieces: Sequence[torch.Tensor], shape: Sequence[int], sizes: Sequence[int]
) -> Iterator[Cut]:
    """Every way to lay pieces on a mesh of these sizes so that they make up the shape."""
    if math.prod(sizes) != len(pieces) or any(one.ndim != len(shape) for one in pieces):
        return
    choices: list[int | None] = [None, *range(len(shape))]
    ways = itertools.product(choices, repeat=len(sizes))
    for dims in itertools.islice(ways, _MAX_WAYS**2):
        if all(dim is None for dim in dims) or not _may_fit(pieces, shape, sizes, dims):
            continue
        yield Cut(sizes, dims)


def lines_along(sizes: Sequence[int], axis: int) -> Iterator[list[int]]:
    """The ranks of each line of the mesh along an axis, in its order."""
    ranks = torch.arange(math.prod(sizes)).reshape(tuple(sizes))
    for line in ranks.movedim(axis, -1).reshape(-1, sizes[axis]):
        yield line.tolist()


def _may_fit(
    pieces: Sequence[torch.Tensor],
    shape: Sequence[int],
    sizes: Sequence[int],
    dims: Sequence[int | None],
) -> bool:
    """Whether the numbers of elements add up, of pieces of any sizes."""
    copies = math.prod(size for size, dim in zip(sizes, dims, strict=True) if dim is None)
    return sum(one.numel() for one in pieces) == copies * math.prod(shape)


def _fit(parts: Sequence[torch.Tensor], dim: int) -> bool:
    rests = {(*one.shape[:dim], *one.shape[dim + 1 :]) for one in parts}
    return len(rests) == 1
