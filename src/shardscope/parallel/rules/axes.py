"""Ops that put dims in another order: permute, transpose and their like; and diagonals."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from shardscope.parallel.rules.book import rule
from shardscope.parallel.rules.call import Call, Strategy, TensorSpec
from shardscope.parallel.rules.dims import can_be_cut, cut, kept_terms, overloads

__all__: list[str] = []

_aten = torch.ops.aten


@rule(
    *(_aten.permute.default, _aten.transpose.int, _aten.swapaxes.default, _aten.swapdims.default),
    *(_aten.t.default, _aten.numpy_T.default, _aten.mT.default, _aten.mH.default),
    *(_aten.adjoint.default, _aten.matrix_H.default, _aten.diagonal.default),
    *overloads("movedim", "moveaxis"),
)
def reorders(call: Call) -> Iterator[Strategy]:
    """Every dim that is still there, wherever it went."""
    for new, old in _sources(call).items():
        if can_be_cut(call.inputs[0].shape[old]):
            yield cut(call, {0: old}, {0: new})
    yield from kept_terms(call)


def _sources(call: Call) -> dict[int, int]:
    """Which old dim each new one is: the op says it itself, of sizes that name their dims."""
    num_dims = call.inputs[0].num_dims
    named = torch.empty([dim + 1 for dim in range(num_dims)], device="meta")
    arguments = {
        name: named if isinstance(value, TensorSpec) else value
        for name, value in call.arguments.items()
    }
    sizes = call.op(**arguments).shape
    num_kept = num_dims - 2 if call.op is _aten.diagonal.default else num_dims
    return {new: size - 1 for new, size in enumerate(sizes[:num_kept])}
