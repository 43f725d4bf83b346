"""Views that fold a tensor's indices anew: view, reshape, flatten, squeeze and their like."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from shardscope._torch.inner_ops import inner_op
from shardscope.parallel.placements import Shard
from shardscope.parallel.rules.blocks import Group, fold, groups_of
from shardscope.parallel.rules.book import rule, speller
from shardscope.parallel.rules.call import Call, Strategy
from shardscope.parallel.rules.dims import cut, kept_terms, with_any_other
from shardscope.parallel.rules.local import Local

__all__ = ["reshapes", "reshapes_like_another", "spell_reshape", "spell_squeeze"]

_aten = torch.ops.aten

_WITH_SIZES = (
    *(_aten.view.default, _aten.reshape.default, inner_op("unsafe_view")),
    *(_aten.unflatten.int, inner_op("reshape_alias")),
)
_LIKE_ANOTHER = (_aten.view_as.default, _aten.reshape_as.default)
_SQUEEZES = (_aten.squeeze.default, _aten.squeeze.dim, _aten.squeeze.dims)


@rule(
    *_WITH_SIZES,
    *_SQUEEZES,
    *(_aten.flatten.using_ints, _aten.ravel.default, _aten.unsqueeze.default),
    *(_aten.atleast_1d.default, _aten.atleast_2d.default, _aten.atleast_3d.default),
)
def reshapes(call: Call) -> Iterator[Strategy]:
    """By the shapes alone: arguments say the same, but of the whole tensor."""
    before, after = call.inputs[0].shape, call.outputs[0].shape
    for group in groups_of(before, after):
        old, new = group
        if len(old) == len(new) == 1:
            yield cut(call, {0: old[0]}, {0: new[0]})
        else:
            yield from _folded(call, group)
    yield from kept_terms(call)


@rule(*_LIKE_ANOTHER)
def reshapes_like_another(call: Call) -> Iterator[Strategy]:
    """As reshapes; of the other tensor only the shape counts."""
    for strategy in reshapes(call):
        yield from with_any_other(call, strategy)


def _folded(call: Call, group: Group) -> Iterator[Strategy]:
    before, after = call.inputs[0].shape, call.outputs[0].shape
    offered = call.offered[0]
    plain = [Shard(dim) for dim in group[0]]
    is_inside = isinstance(offered, Shard) and offered.dim in group[0]
    for one in dict.fromkeys([*plain, *([offered] if is_inside else [])]):
        assert isinstance(one, Shard)
        new = fold(one, before, after, group=group, num_ranks=call.num_ranks)
        if new is not None:
            yield Strategy((one,), (new,), is_order_blind=False)


@speller(*_WITH_SIZES, *_LIKE_ANOTHER)
def spell_reshape(local: Local) -> Any:
    """With the sizes of the piece. A piece may be strided where the whole is not: no view."""
    return local.pen.write(_aten.reshape.default, local["self"], local.output_shape())


@speller(*_SQUEEZES)
def spell_squeeze(local: Local) -> Any:
    """Only the dims that the whole has squeezed: a piece may have more of size one."""
    shape = local.call.inputs[0].shape
    asked = local.arguments.get("dim")
    dims = range(len(shape)) if asked is None else [asked] if isinstance(asked, int) else asked
    gone = [dim for dim in dims if shape[dim] == 1]
    return local.pen.write(_aten.squeeze.dims, local["self"], gone)
