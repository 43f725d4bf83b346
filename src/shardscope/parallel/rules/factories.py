"""Tensors made from the shape or the type of another, whose values nobody reads."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from shardscope.parallel.placements import Partial, Replicate, Shard
from shardscope.parallel.rules.book import rule
from shardscope.parallel.rules.call import Call, Strategy
from shardscope.parallel.rules.terms import lay, offered_to

__all__ = ["cut_like", "cut_new"]

aten = torch.ops.aten

_NEW = (
    aten.new_zeros.default,
    aten.new_ones.default,
    aten.new_full.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
)
_LIKE = (
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.full_like.default,
    aten.empty_like.default,
)


@rule(*_NEW)
def cut_new(call: Call) -> Iterator[Strategy]:
    """They take a tensor for its type: however it lies, it will do."""
    yield lay(call, {"self": offered_to(call, "self")}, Replicate(), is_order_blind=False)


@rule(*_LIKE)
def cut_like(call: Call) -> Iterator[Strategy]:
    """They follow the tensor that they look like. What looks like addends is whole."""
    for dim in range(call["self"].num_dims):
        yield lay(call, {"self": Shard(dim)}, Shard(dim))
    if isinstance(offered_to(call, "self")[0], Partial):
        yield lay(call, {"self": offered_to(call, "self")}, Replicate())
