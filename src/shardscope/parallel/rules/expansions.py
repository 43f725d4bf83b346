"""Ops that repeat what a tensor holds: expand, repeat, tile, repeat_interleave."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from shardscope.parallel.placements import Shard, Size
from shardscope.parallel.rules.blocks import quotient
from shardscope.parallel.rules.book import rule, speller
from shardscope.parallel.rules.call import Call, Strategy
from shardscope.parallel.rules.dims import (
    can_be_cut,
    cut,
    kept_terms,
    matched_dims,
    with_any_other,
    wrap,
)
from shardscope.parallel.rules.local import Local

__all__ = [
    "expands",
    "expands_like_another",
    "interleaves",
    "repeats",
    "spell_expand",
    "spell_interleave",
    "spell_repeat",
]

_aten = torch.ops.aten
_EXPANDS = (_aten.expand.default, _aten.broadcast_to.default)
_REPEATS = (_aten.repeat.default, _aten.tile.default)


@rule(*_EXPANDS)
def expands(call: Call) -> Iterator[Strategy]:
    """Dims that were there stay cut; along those that come, each rank makes its own piece."""
    yield from _kept_dims(call)
    for dim in _new_dims(call):
        yield cut(call, {}, {0: dim})
    yield from kept_terms(call)


@rule(_aten.expand_as.default)
def expands_like_another(call: Call) -> Iterator[Strategy]:
    """As expands; of the other tensor only the shape counts."""
    for strategy in expands(call):
        yield from with_any_other(call, strategy)


@rule(*_REPEATS)
def repeats(call: Call) -> Iterator[Strategy]:
    """As expands; a dim that is repeated as a whole becomes that many blocks, each cut alike."""
    yield from expands(call)
    before, after = call.inputs[0].shape, call.outputs[0].shape
    offset = len(after) - len(before)
    for dim, size in enumerate(before):
        times = quotient(after[dim + offset], size) if can_be_cut(size) else None
        if times is not None and times != 1:
            yield from _stretched(call, dim, dim + offset, partial(_again, times=times))


@rule(_aten.repeat_interleave.self_int)
def interleaves(call: Call) -> Iterator[Strategy]:
    """Each index is repeated on the spot, so a piece becomes a longer piece."""
    yield from kept_terms(call)
    before, after = call.inputs[0].shape, call.outputs[0].shape
    if call["dim"] is None and len(before) != 1:
        return  # it flattens first
    along = wrap(call["dim"] or 0, len(before))
    for dim, size in enumerate(before):
        if dim != along and can_be_cut(size):
            yield cut(call, {0: dim}, {0: dim})
    times = quotient(after[along], before[along])
    if can_be_cut(before[along]) and times is not None:
        yield from _stretched(call, along, along, partial(_longer, times=times))


@speller(*_EXPANDS, _aten.expand_as.default)
def spell_expand(local: Local) -> Any:
    return local.pen.write(_aten.expand.default, local["self"], local.output_shape())


@speller(*_REPEATS)
def spell_repeat(local: Local) -> Any:
    """As often as the piece of the result is longer than the piece that is repeated."""
    shape = local.inputs[0].local_shape(local.seat)
    whole = local.outputs[0].local_shape(local.seat)
    padded = [1] * (len(whole) - len(shape)) + list(shape)
    times = [quotient(new, old) or 1 for old, new in zip(padded, whole, strict=True)]
    return local.pen.write(
        _aten.repeat.default, local["self"], [local.pen.size(one) for one in times]
    )


@speller(_aten.repeat_interleave.self_int)
def spell_interleave(local: Local) -> Any:
    return local.repeat(output_size=None)


def _kept_dims(call: Call) -> Iterator[Strategy]:
    for old, new in matched_dims(call.inputs[0].shape, call.outputs[0].shape):
        yield cut(call, {0: old}, {0: new})


def _new_dims(call: Call) -> Iterator[int]:
    before, after = call.inputs[0].shape, call.outputs[0].shape
    offset = len(after) - len(before)
    for dim, size in enumerate(after):
        if can_be_cut(size) and (dim < offset or before[dim - offset] == 1):
            yield dim


def _stretched(
    call: Call, old: int, new: int, stretch: Callable[[Shard], Shard]
) -> Iterator[Strategy]:
    offered = call.offered[0]
    is_here = isinstance(offered, Shard) and offered.dim == old
    for one in dict.fromkeys([Shard(old), *([offered] if is_here else [])]):
        assert isinstance(one, Shard)
        yield Strategy((one,), (stretch(one).at(new),), is_order_blind=False)


def _again(one: Shard, times: Size) -> Shard:
    if one.segments:
        return Shard(one.dim, segments=one.segments * times)
    return Shard(one.dim, one.outer * times)


def _longer(one: Shard, times: Size) -> Shard:
    return Shard(one.dim, one.outer, tuple(size * times for size in one.segments))
