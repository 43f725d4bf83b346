"""Products of groups of rows, each with its own matrix, as mixtures of experts use."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from shardscope._torch.inner_ops import inner_op
from shardscope.parallel.placements import Partial, Shard, divides
from shardscope.parallel.rules.book import rule
from shardscope.parallel.rules.call import Call, Strategy, TensorSpec
from shardscope.parallel.rules.terms import lay

__all__ = ["cut_grouped_mm"]

aten = torch.ops.aten

_ALIGNMENT_BYTES = 16


@rule(inner_op("grouped_mm"))
def cut_grouped_mm(call: Call) -> Iterator[Strategy]:
    """Rows whose groups `offs` marks stay whole; so do the groups, which it counts."""
    rows, matrices = call["self"], call["mat2"]
    if rows.num_dims != 2 or matrices.num_dims != 3 or call["bias"] is not None:
        return
    if _stays_aligned(call, matrices, 2):
        yield lay(call, {"mat2": Shard(2)}, Shard(1))
    if _stays_aligned(call, matrices, 1):
        yield lay(call, {"self": Shard(1), "mat2": Shard(1)}, Partial())


def _stays_aligned(call: Call, spec: TensorSpec, dim: int) -> bool:
    step = _ALIGNMENT_BYTES // spec.dtype.itemsize
    return divides(step * call.num_ranks, spec.shape[dim])
