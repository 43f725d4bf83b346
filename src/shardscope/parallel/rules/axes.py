"""Ops that put dims in another order: permute, transpose and their like; and diagonals."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from shardscope.parallel.rules.book import rule
from shardscope.parallel.rules.call import Call, Strategy
from shardscope.parallel.rules.dims import can_be_cut, cut, kept_terms, overloads, sources, wrap

__all__ = ["diagonals", "reorders"]

_aten = torch.ops.aten


@rule(
    *(_aten.permute.default, _aten.transpose.int, _aten.swapaxes.default, _aten.swapdims.default),
    *(_aten.t.default, _aten.numpy_T.default, _aten.mT.default, _aten.mH.default),
    *(_aten.adjoint.default, _aten.matrix_H.default),
    *overloads("movedim", "moveaxis"),
)
def reorders(call: Call) -> Iterator[Strategy]:
    """Every dim, wherever it went."""
    for new, old in sources(call).items():
        if can_be_cut(call.inputs[0].shape[old]):
            yield cut(call, {0: old}, {0: new})
    yield from kept_terms(call)


@rule(_aten.diagonal.default)
def diagonals(call: Call) -> Iterator[Strategy]:
    """Every dim but the two that it runs through, which become the last."""
    num_dims = call.inputs[0].num_dims
    gone = {wrap(call["dim1"], num_dims), wrap(call["dim2"], num_dims)}
    kept = [dim for dim in range(num_dims) if dim not in gone]
    for new, old in enumerate(kept):
        if can_be_cut(call.inputs[0].shape[old]):
            yield cut(call, {0: old}, {0: new})
    yield from kept_terms(call)
