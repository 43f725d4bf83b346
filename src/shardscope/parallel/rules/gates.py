"""glu: the halves of a dim, one of which is the other's gate."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from shardscope.parallel.placements import Shard, Size, divides
from shardscope.parallel.rules.blocks import quotient
from shardscope.parallel.rules.book import rule
from shardscope.parallel.rules.call import Call, Strategy
from shardscope.parallel.rules.dims import can_be_cut, cut, wrap

__all__ = ["gates"]


@rule(torch.ops.aten.glu.default)
def gates(call: Call) -> Iterator[Strategy]:
    """Other dims; and its own where both halves are cut alike, which a rank then halves too."""
    own = call.inputs[0]
    halved = wrap(call["dim"], own.num_dims)
    for dim, size in enumerate(own.shape):
        if dim != halved and can_be_cut(size):
            yield cut(call, {0: dim}, {0: dim})
    offered = call.offered[0]
    tried = [Shard(halved, outer=2), *([offered] if isinstance(offered, Shard) else [])]
    for one in dict.fromkeys(tried):
        half = _half_of(one) if one.dim == halved else None
        if half is not None and _is_even(one, own.shape[halved], call.num_ranks):
            yield Strategy((one,), (half,), is_order_blind=False)


def _half_of(cut: Shard) -> Shard | None:
    """The cut of one half, if both halves are cut in the same blocks."""
    middle = len(cut.segments) // 2
    if cut.segments:
        left, right = cut.segments[:middle], cut.segments[middle:]
        return None if left != right else Shard(cut.dim, segments=left if middle > 1 else ())
    outer = quotient(cut.outer, 2)
    return None if outer is None else Shard(cut.dim, outer)


def _is_even(cut: Shard, size: Size, num_ranks: int) -> bool:
    if cut.segments:
        return all(one % num_ranks == 0 for one in cut.segments)
    return divides(cut.outer * num_ranks, size)
