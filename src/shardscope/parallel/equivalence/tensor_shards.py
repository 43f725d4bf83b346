"""Finds how the plain tensors of all ranks, one shard each, make up the full tensor.

A plain tensor has no placement, so every layout that fits its shape is tried: contiguous shards in
rank order, and the orders that context parallelism uses.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import final

import torch

_MAX_LAYOUTS = 4096


class Order(StrEnum):
    """Which of the equal chunks along a dim each rank of an axis holds."""

    CONTIGUOUS = "contiguous"  # rank r has chunk r of n
    ZIGZAG = "zigzag"  # rank r has chunks r and 2n - 1 - r of 2n
    STRIPED = "striped"  # rank r has every n-th element, starting at r


@final
@dataclass(frozen=True)
class Layout:
    """For each mesh axis the tensor dim that it shards, or None where it replicates.

    Where two axes shard one dim, a later axis shards within an earlier one; with `is_strided`
    an earlier within a later, as FSDP does with a dim that tensor parallelism shards.
    """

    sizes: tuple[int, ...]
    dims: tuple[int | None, ...]
    orders: tuple[Order, ...]
    is_strided: bool = False

    @property
    def is_contiguous(self) -> bool:
        """Whether every rank holds one contiguous chunk."""
        return all(order is Order.CONTIGUOUS for order in self.orders)

    def join(self, shards: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
        """The full tensor on each rank; None if the shards do not fit together."""
        full = list(shards)
        axes = range(len(self.sizes))
        for axis in axes if self.is_strided else reversed(axes):
            dim = self.dims[axis]
            if dim is None:
                continue
            for line in ranks_along(self.sizes, axis):
                joined = _join([full[rank] for rank in line], dim, self.orders[axis])
                if joined is None:
                    return None
                for rank in line:
                    full[rank] = joined
        return full

    def split(self, full: torch.Tensor, shards: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The shard of a full tensor that each rank should hold, given shards of these shapes."""
        starts = itertools.accumulate((shard.numel() for shard in shards), initial=0)
        numbered = [
            torch.arange(start, start + shard.numel()).reshape(shard.shape)
            for start, shard in zip(starts, shards, strict=False)
        ]
        joined = self.join(numbered)
        assert joined is not None, "shards that were joined once"
        parts = [torch.zeros(shard.numel(), dtype=full.dtype) for shard in shards]
        elements = torch.zeros(sum(shard.numel() for shard in shards), dtype=full.dtype)
        for indices in joined:
            elements[indices.flatten()] = full.flatten()
        for part, indices in zip(parts, numbered, strict=True):
            part.copy_(elements[indices.flatten()])
        return [part.reshape(shard.shape) for part, shard in zip(parts, shards, strict=True)]

    def describe(self, axes: Sequence[str]) -> str:
        """The layout as text, such as `dim 1 over cp (zigzag)`."""
        parts = []
        for axis, dim, order in zip(axes, self.dims, self.orders, strict=True):
            if dim is not None:
                note = "" if order is Order.CONTIGUOUS else f" ({order})"
                parts.append(f"dim {dim} over {axis}{note}")
        return " and ".join(parts)


def shard_layouts(
    shards: Sequence[torch.Tensor], shape: Sequence[int], sizes: Sequence[int]
) -> Iterator[Layout]:
    """Every layout on a mesh of these sizes in which the shards can make up the shape."""
    if math.prod(sizes) != len(shards) or any(shard.ndim != len(shape) for shard in shards):
        return
    sizes = tuple(sizes)
    choices: list[int | None] = [None, *range(len(shape))]
    fitting = [
        dims
        for dims in itertools.islice(itertools.product(choices, repeat=len(sizes)), _MAX_LAYOUTS)
        if any(dim is not None for dim in dims) and _has_all(shards, shape, sizes, dims)
    ]
    contiguous = (Order.CONTIGUOUS,) * len(sizes)
    for dims in fitting:
        yield Layout(sizes, dims, contiguous)
    for dims in fitting:
        sharded = [axis for axis, dim in enumerate(dims) if dim is not None]
        if len({dims[axis] for axis in sharded}) < len(sharded):
            yield Layout(sizes, dims, contiguous, is_strided=True)
        for axis, order in itertools.product(sharded, (Order.ZIGZAG, Order.STRIPED)):
            if sizes[axis] > 1:
                orders = (*contiguous[:axis], order, *contiguous[axis + 1 :])
                yield Layout(sizes, dims, orders)


def ranks_along(sizes: Sequence[int], axis: int) -> Iterator[list[int]]:
    """The ranks of each line of the mesh along an axis, in order."""
    ranks = torch.arange(math.prod(sizes)).reshape(tuple(sizes))
    for line in ranks.movedim(axis, -1).reshape(-1, sizes[axis]):
        yield line.tolist()


def ranks_across(sizes: Sequence[int], axis: int) -> list[list[int]]:
    """For each coordinate along an axis, all ranks that have it."""
    ranks = torch.arange(math.prod(sizes)).reshape(tuple(sizes))
    across: list[list[int]] = ranks.movedim(axis, 0).reshape(sizes[axis], -1).tolist()
    return across


def find_submesh(sizes: Sequence[int], ranks: Sequence[int]) -> tuple[int, ...]:
    """The sizes of the submesh that these ranks form; a line if they form none."""
    coordinates = list(itertools.product(*(range(size) for size in sizes)))
    chosen = [coordinates[rank] for rank in ranks]
    part = tuple(len(set(along)) for along in zip(*chosen, strict=True))
    is_even = math.prod(part) == len(ranks)
    return part if is_even else (*(1 for _ in sizes[1:]), len(ranks))


def ranks_by_distance(sizes: Sequence[int], rank: int) -> list[int]:
    """All ranks of a mesh, sorted by the number of coordinates that differ from this rank's."""
    coordinates = list(itertools.product(*(range(size) for size in sizes)))

    def distance(candidate: int) -> tuple[int, int]:
        pairs = zip(coordinates[rank], coordinates[candidate], strict=True)
        return sum(own_coordinate != coordinate for own_coordinate, coordinate in pairs), candidate

    return sorted(range(len(coordinates)), key=distance)


def _has_all(
    shards: Sequence[torch.Tensor],
    shape: Sequence[int],
    sizes: Sequence[int],
    dims: Sequence[int | None],
) -> bool:
    """Whether the numbers of elements add up; shards may be uneven."""
    copies = math.prod(size for size, dim in zip(sizes, dims, strict=True) if dim is None)
    return sum(shard.numel() for shard in shards) == copies * math.prod(shape)


def _join(parts: Sequence[torch.Tensor], dim: int, order: Order) -> torch.Tensor | None:
    if len({(*part.shape[:dim], *part.shape[dim + 1 :]) for part in parts}) > 1:
        return None
    if order is Order.CONTIGUOUS:
        return torch.cat(list(parts), dim)
    size = parts[0].shape[dim]
    if any(part.shape[dim] != size for part in parts):
        return None
    if order is Order.STRIPED:
        return torch.stack(list(parts), dim + 1).flatten(dim, dim + 1)
    if size % 2:
        return None
    heads, tails = zip(*(part.chunk(2, dim) for part in parts), strict=True)
    return torch.cat([*heads, *reversed(tails)], dim)
