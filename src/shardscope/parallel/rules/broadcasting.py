"""Several tensors brought to one shape."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from shardscope.parallel.placements import Shard
from shardscope.parallel.rules.book import rule
from shardscope.parallel.rules.call import Call, Strategy
from shardscope.parallel.rules.dims import can_be_cut
from shardscope.parallel.rules.terms import broadcast_cut, keep_terms, lay

__all__ = ["cut_broadcast"]

aten = torch.ops.aten


@rule(aten.broadcast_tensors.default)
def cut_broadcast(call: Call) -> Iterator[Strategy]:
    """All results are cut alike, and of the tensors those that have the dim."""
    whole = call.outputs[0]
    for dim, size in enumerate(whole.shape):
        if can_be_cut(size):
            cuts = [broadcast_cut(one, whole, dim) for one in call["tensors"]]
            yield lay(call, {"tensors": cuts}, Shard(dim))
    yield from keep_terms(call, "tensors")
