"""Indexing by a list of tensors, to read and to write: `x[:, i]`, `x[i, j] = y`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, final

import torch

from shardscope.parallel.placements import Partial, Placement, Replicate, Shard
from shardscope.parallel.rules.book import rule, speller
from shardscope.parallel.rules.call import Call, Strategy, TensorSpec
from shardscope.parallel.rules.local import Local
from shardscope.parallel.rules.pieces import (
    can_pick_own,
    count_once,
    is_cut,
    mask_others,
    write_zeros,
)
from shardscope.parallel.rules.terms import broadcast_cut, can_add, lay

__all__ = ["cut_index", "cut_index_put", "spell_index", "spell_index_put"]

aten = torch.ops.aten


@final
@dataclass(frozen=True)
class _Indexing:
    """Which dims are picked from, and where the picked ones stand in the result."""

    source: TensorSpec
    indices: Sequence[TensorSpec | None]

    @cached_property
    def has_masks(self) -> bool:
        return any(one is not None and _is_mask(one) for one in self.indices)

    @cached_property
    def picked_dims(self) -> list[int]:
        """Dims of the source, one for each index; a mask takes as many as it has."""
        dims: list[int] = []
        at = 0
        for one in self.indices:
            num_dims = one.num_dims if one is not None and _is_mask(one) else 1
            if one is not None:
                dims += range(at, at + num_dims)
            at += num_dims
        return dims

    @cached_property
    def num_index_dims(self) -> int:
        """How many dims the indices have together."""
        return max(1 if _is_mask(one) else one.num_dims for one in self.indices if one is not None)

    @cached_property
    def first(self) -> int:
        """Where those dims begin: in place of the picked ones, or in front if these are apart."""
        dims = self.picked_dims
        return dims[0] if dims == list(range(dims[0], dims[-1] + 1)) else 0

    def kept_dims(self) -> Iterator[tuple[int, int]]:
        """Dims that no index touches, in the source and in the result."""
        kept = [dim for dim in range(self.source.num_dims) if dim not in self.picked_dims]
        for position, dim in enumerate(kept):
            yield dim, position if position < self.first else position + self.num_index_dims

    def cut_indices(self, dim: int) -> list[Placement]:
        """How the indices lie, one after the other, when a dim that they share is cut."""
        given = [one for one in self.indices if one is not None]
        own = [dim - self.num_index_dims + one.num_dims for one in given]
        return [
            Shard(at) if at >= 0 and one.shape[at] != 1 else Replicate()
            for one, at in zip(given, own, strict=True)
        ]


def _is_mask(spec: TensorSpec) -> bool:
    return spec.dtype in (torch.bool, torch.uint8)


@rule(aten.index.Tensor)
def cut_index(call: Call) -> Iterator[Strategy]:
    how = _Indexing(call["self"], call["indices"])
    for dim, kept in how.kept_dims():
        yield lay(call, {"self": Shard(dim)}, Shard(kept))
    if can_add(call["self"]):
        yield lay(call, {"self": Partial()}, Partial())
    if how.has_masks:
        return  # how many a mask picks is known only when it runs
    yield from _cut_indices(call, how)
    for dim in how.picked_dims:
        if can_pick_own(call, dim):
            yield lay(call, {"self": Shard(dim)}, Partial(), is_order_blind=False)


def _cut_indices(call: Call, how: _Indexing) -> Iterator[Strategy]:
    for dim in range(how.num_index_dims):
        cuts = how.cut_indices(dim)
        if any(isinstance(one, Shard) for one in cuts):
            yield lay(call, {"indices": cuts}, Shard(how.first + dim))


@speller(aten.index.Tensor)
def spell_index(local: Local) -> Any:
    """Where dims are cut that are picked from, a rank picks its own and leaves others zero."""
    layout, how = local.input_layout("self"), _Indexing(local.call["self"], local.call["indices"])
    cut_dims = [dim for dim in how.picked_dims if is_cut(layout, dim)]
    if not cut_dims:
        return local.repeat()
    if any(layout.local_shape(local.seat)[dim] == 0 for dim in cut_dims):
        return write_zeros(local, local["self"])
    indices, masks = list(local["indices"]), []
    for dim in cut_dims:
        index = _count_from_front(local, indices[dim], layout.shape[dim])
        indices[dim], is_others = mask_others(local, index, layout=layout, dim=dim)
        masks.append(is_others)
    return _write_masked(local, local.repeat(indices=indices), masks, how)


def _count_from_front(local: Local, index: Any, size: int) -> Any:
    write = local.pen.write
    return write(aten.remainder.Scalar, index, size)


def _write_masked(local: Local, picked: Any, masks: list[Any], how: _Indexing) -> Any:
    dims_behind = len(local.outputs[0].shape) - how.first - how.num_index_dims
    for mask in masks:
        for _ in range(dims_behind):
            mask = local.pen.write(aten.unsqueeze.default, mask, -1)
        picked = local.pen.write(aten.masked_fill.Scalar, picked, mask, 0)
    return picked


@rule(aten.index_put.default)
def cut_index_put(call: Call) -> Iterator[Strategy]:
    how = _Indexing(call["self"], call["indices"])
    if how.has_masks and call["values"].num_dims > 0:
        return  # how many values a mask takes is known only when it runs
    result = _shape_of_picked(how)
    for dim, kept in how.kept_dims():
        values = broadcast_cut(call["values"], result, kept)
        yield lay(call, {"self": Shard(dim), "values": values}, Shard(dim))
    if can_add(call["self"]):
        yield lay(call, {"self": Partial(), "values": Partial()}, Partial())
    if how.has_masks:
        yield from _cut_masks(call)
    elif call["accumulate"] and can_add(call["self"]):
        yield from _cut_put_indices(call, how, result)


def _shape_of_picked(how: _Indexing) -> TensorSpec:
    """What reading with the same indices would give: values broadcast to it."""
    given = [one for one in how.indices if one is not None and not _is_mask(one)]
    picked = [
        next((one.shape[at] for one in given if _has(one, at) and one.shape[at] != 1), 1)
        for at in range(-how.num_index_dims, 0)
    ]
    kept = [size for dim, size in enumerate(how.source.shape) if dim not in how.picked_dims]
    shape = (*kept[: how.first], *picked, *kept[how.first :])
    return TensorSpec(shape, how.source.dtype)


def _has(spec: TensorSpec, dim_from_end: int) -> bool:
    return spec.num_dims >= -dim_from_end


def _cut_masks(call: Call) -> Iterator[Strategy]:
    """One number put wherever a mask says, with the mask cut as what it is laid on."""
    if len(call["indices"]) == 1:
        for dim in range(call["indices"][0].num_dims):
            cuts: dict[str, Any] = {"self": Shard(dim), "indices": Shard(dim)}
            yield lay(call, cuts, Shard(dim))


def _cut_put_indices(call: Call, how: _Indexing, result: TensorSpec) -> Iterator[Strategy]:
    """What is added up may be added by different ranks."""
    for dim in range(how.num_index_dims):
        cuts = how.cut_indices(dim)
        values = broadcast_cut(call["values"], result, how.first + dim)
        if any(isinstance(one, Shard) for one in cuts):
            for whole in (Replicate(), Partial()):
                placed: dict[str, Any] = {"self": whole, "indices": cuts, "values": values}
                yield lay(call, placed, Partial())


@speller(aten.index_put.default)
def spell_index_put(local: Local) -> Any:
    return local.repeat(self=count_once(local, "self"))
