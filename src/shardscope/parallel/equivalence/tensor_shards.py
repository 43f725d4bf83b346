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
_MAX_ROWS = 64  # of a flattened dim


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
    an earlier within a later, as FSDP does with a dim that tensor parallelism shards. With
    `num_rows` above 1, dims are flattened from so many rows, each of which is sharded, as where
    tokens of all sequences are flattened that context parallelism shards.
    """

    sizes: tuple[int, ...]
    dims: tuple[int | None, ...]
    orders: tuple[Order, ...]
    is_strided: bool = False
    num_rows: int = 1

    @property
    def is_contiguous(self) -> bool:
        """Whether every rank holds one contiguous chunk."""
        return self.num_rows == 1 and all(order is Order.CONTIGUOUS for order in self.orders)

    def join(self, shards: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
        """The full tensor on each rank; None if the shards do not fit together."""
        full = list(shards)
        axes = range(len(self.sizes))
        for axis in axes if self.is_strided else reversed(axes):
            dim = self.dims[axis]
            if dim is None:
                continue
            for line in ranks_along(self.sizes, axis):
                parts = [full[rank] for rank in line]
                joined = _join_rows(parts, dim, self.orders[axis], self.num_rows)
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
                rows = f" (within each of {self.num_rows} rows)" if self.num_rows > 1 else ""
                parts.append(f"dim {dim} over {axis}{note}{rows}")
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
    for dims in fitting:
        yield from _flattened_layouts(shards, sizes, dims)


def _flattened_layouts(
    shards: Sequence[torch.Tensor], sizes: tuple[int, ...], dims: Sequence[int | None]
) -> Iterator[Layout]:
    """Layouts in which one axis shards each row of a first dim that is flattened from rows."""
    sharded = [axis for axis, dim in enumerate(dims) if dim is not None]
    if len(sharded) != 1 or dims[sharded[0]] != 0 or sizes[sharded[0]] < 2:
        return
    lengths = {shard.shape[0] for shard in shards}
    length = lengths.pop() if len(lengths) == 1 else 0
    for num_rows in range(2, min(length // 2, _MAX_ROWS) + 1):
        if length % num_rows == 0:
            for order in (Order.CONTIGUOUS, Order.ZIGZAG):
                orders = tuple(
                    order if axis in sharded else Order.CONTIGUOUS for axis in range(len(sizes))
                )
                yield Layout(sizes, tuple(dims), orders, num_rows=num_rows)


def trim_padding(
    tensors: Sequence[torch.Tensor], shape: Sequence[int], sizes: Sequence[int]
) -> Iterator[list[torch.Tensor]]:
    """The tensors of the ranks without padding at the end of a dim, for each dim that may have it.

    Such as the logits of a vocabulary that is padded to a multiple of the number of ranks. Either
    every rank has all of the dim, or the shards along an axis are longer than it together.
    """
    if any(tensor.ndim != len(shape) for tensor in tensors):
        return
    for dim, length in enumerate(shape):
        if all(tensor.shape[dim] > length for tensor in tensors):
            yield [tensor.narrow(dim, 0, length) for tensor in tensors]
        for axis in range(len(sizes)):
            trimmed, lines = list(tensors), list(ranks_along(sizes, axis))
            for line in lines:
                start = 0
                for rank in line:
                    size = tensors[rank].shape[dim]
                    trimmed[rank] = tensors[rank].narrow(dim, 0, min(size, max(length - start, 0)))
                    start += size
            is_padded = all(sum(tensors[r].shape[dim] for r in line) > length for line in lines)
            if sizes[axis] > 1 and is_padded:
                yield trimmed


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


def _join_rows(
    parts: Sequence[torch.Tensor], dim: int, order: Order, num_rows: int
) -> torch.Tensor | None:
    """Join shards, or, if the dim is flattened from several rows, those of each row."""
    if num_rows == 1:
        return _join(parts, dim, order)
    if any(part.shape[dim] % num_rows or not part.numel() for part in parts):
        return None
    rows = [part.reshape(*part.shape[:dim], num_rows, -1, *part.shape[dim + 1 :]) for part in parts]
    joined = _join(rows, dim + 1, order)
    return None if joined is None else joined.flatten(dim, dim + 1)


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
