"""Grouped matrix multiplication: groups of rows, each with its own matrix, as in mixtures of
experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from shardscope._torch.dispatch import private_aten_op
from shardscope.parallel.ir.graph import Strategy
from shardscope.parallel.sharding_rules.builders import make_strategy
from shardscope.parallel.sharding_rules.context import OpCall, TensorSpec
from shardscope.parallel.sharding_rules.registry import rule
from shardscope.plan.placements import Partial, Shard, divides

aten = torch.ops.aten

_ALIGNMENT_BYTES = 16


@torch.library.custom_op("shardscope::grouped_mm", mutates_args=())
def grouped_mm(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """Rows [S, in] times one of the matrices [E, in, out] each: those up to ends[0] times the
    first, from there to ends[1] times the second.

    For dtypes that torch's own op refuses to trace: in torch 2.13, all but bfloat16.
    """
    result = rows.new_zeros(rows.shape[0], matrices.shape[2])
    for index, (start, end) in enumerate(_spans(ends)):
        result[start:end] = rows[start:end] @ matrices[index]
    return result


@torch.library.custom_op("shardscope::grouped_mm_gradient", mutates_args=())
def _matrix_gradients(rows: Tensor, gradient: Tensor, ends: Tensor) -> Tensor:
    """The gradients [E, in, out] of the matrices."""
    result = rows.new_zeros(ends.shape[0], rows.shape[1], gradient.shape[1])
    for index, (start, end) in enumerate(_spans(ends)):
        result[index] = rows[start:end].T @ gradient[start:end]
    return result


def _spans(ends: Tensor) -> list[tuple[int, int]]:
    stops = ends.tolist()
    return list(zip([0, *stops[:-1]], stops, strict=True))


@grouped_mm.register_fake
def _(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    return rows.new_empty(rows.shape[0], matrices.shape[2])


@_matrix_gradients.register_fake
def _(rows: Tensor, gradient: Tensor, ends: Tensor) -> Tensor:
    return rows.new_empty(ends.shape[0], rows.shape[1], gradient.shape[1])


def _save_inputs(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _differentiate(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
    rows, matrices, ends = ctx.saved_tensors
    rows_gradient = grouped_mm(gradient, matrices.transpose(-2, -1), ends)
    return rows_gradient, _matrix_gradients(rows, gradient, ends), None


grouped_mm.register_autograd(_differentiate, setup_context=_save_inputs)


@rule(private_aten_op("grouped_mm"))
def shard_grouped_mm(call: OpCall) -> Iterator[Strategy]:
    """The features in and out. Rows are replicated, since `offs` marks their groups; so are the
    groups.
    """
    rows, matrices = call.tensor("self"), call.tensor("mat2")
    if rows.num_dims != 2 or matrices.num_dims != 3 or call["bias"] is not None:
        return
    if _is_aligned(call, matrices, 2):
        yield make_strategy(call, {"mat2": Shard(2)}, Shard(1))
    if _is_aligned(call, matrices, 1):
        yield make_strategy(call, {"self": Shard(1), "mat2": Shard(1)}, Partial())


@rule(torch.ops.shardscope.grouped_mm.default)
def shard_unaligned_grouped_mm(call: OpCall) -> Iterator[Strategy]:
    """The same as for torch's op, without its alignment condition."""
    yield make_strategy(call, {"matrices": Shard(2)}, Shard(1))
    yield make_strategy(call, {"rows": Shard(1), "matrices": Shard(1)}, Partial())


def _is_aligned(call: OpCall, spec: TensorSpec, dim: int) -> bool:
    num_elements = _ALIGNMENT_BYTES // spec.dtype.itemsize
    return divides(num_elements * call.num_ranks, spec.shape[dim])
