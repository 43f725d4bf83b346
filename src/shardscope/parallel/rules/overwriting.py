"""The diagonal of a tensor replaced by another's values: what is left of in-place writes to it."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from shardscope.parallel.rules.book import rule
from shardscope.parallel.rules.call import Call, Strategy
from shardscope.parallel.rules.dims import can_be_cut, cut, terms, wrap

__all__ = ["diagonal_scatters"]

_aten = torch.ops.aten


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
