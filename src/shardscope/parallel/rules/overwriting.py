"""Parts of a tensor replaced by another's values: what is left of in-place writes to slices."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from shardscope.parallel.rules.book import rule
from shardscope.parallel.rules.call import Call, Strategy
from shardscope.parallel.rules.dims import can_be_cut, cut, terms, wrap
from shardscope.parallel.rules.writing import cut_written

__all__ = ["diagonal_scatters", "select_scatters", "slice_scatters"]

_aten = torch.ops.aten


@rule(_aten.slice_scatter.default)
def slice_scatters(call: Call) -> Iterator[Strategy]:
    """Every dim; of the slice's own, each rank writes what falls into its piece."""
    own = call["self"]
    sliced = wrap(call["dim"], own.num_dims)
    for dim, size in enumerate(own.shape):
        if can_be_cut(size) and (dim != sliced or _is_all(call, sliced)):
            yield cut(call, {0: dim, 1: dim}, {0: dim})
    if not _is_all(call, sliced):
        yield from cut_written(call, sliced)
    yield from _added(call)


@rule(_aten.select_scatter.default)
def select_scatters(call: Call) -> Iterator[Strategy]:
    """Every dim; of the one of which an index is replaced, the rank that has it replaces it."""
    num_dims = call["self"].num_dims
    yield from _without(call, [wrap(call["dim"], num_dims)])
    yield from cut_written(call, wrap(call["dim"], num_dims))
    yield from _added(call)


@rule(_aten.diagonal_scatter.default)
def diagonal_scatters(call: Call) -> Iterator[Strategy]:
    """Every dim but the two that the diagonal runs through."""
    num_dims = call["self"].num_dims
    yield from _without(call, [wrap(call[name], num_dims) for name in ("dim1", "dim2")])
    yield from _added(call)


def _without(call: Call, gone: list[int]) -> Iterator[Strategy]:
    kept = [dim for dim in range(call["self"].num_dims) if dim not in gone]
    for position, dim in enumerate(kept):
        if can_be_cut(call["self"].shape[dim]):
            yield cut(call, {0: dim, 1: position}, {0: dim})


def _added(call: Call) -> Iterator[Strategy]:
    """Where both are in addends, so is the result, if the new ones are not rounded."""
    before, after = call["src"].dtype, call["self"].dtype
    if torch.bool not in (before, after) and torch.promote_types(before, after) == after:
        yield terms(call, 0, 1)


def _is_all(call: Call, dim: int) -> bool:
    size, end = call["self"].shape[dim], call["end"]
    reaches_end = end is None or end == size or (isinstance(end, int) and end >= 2**62)
    return call["start"] in (None, 0) and call["step"] == 1 and reaches_end
