"""Elements picked by indices. What is picked from may be cut too: then a rank picks its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from shardscope.parallel.placements import Partial, Shard
from shardscope.parallel.rules.book import rule, speller
from shardscope.parallel.rules.call import Call, Strategy
from shardscope.parallel.rules.dims import wrap
from shardscope.parallel.rules.local import Local
from shardscope.parallel.rules.pieces import can_pick_own, is_cut, mask_others, write_zeros
from shardscope.parallel.rules.terms import (
    broadcast_cut,
    keep_terms,
    lay,
)

__all__ = ["cut_gather", "cut_index_select", "cut_take_along_dim"]

aten = torch.ops.aten


@rule(aten.gather.default)
def cut_gather(call: Call) -> Iterator[Strategy]:
    source, index = call["self"], call["index"]
    picked = wrap(call["dim"], source.num_dims)
    if index.num_dims != source.num_dims:
        return  # a scalar and a vector, or an empty index
    for dim in range(source.num_dims):
        if dim == picked:
            yield lay(call, {"index": Shard(dim)}, Shard(dim))
        elif source.shape[dim] == index.shape[dim]:
            yield lay(call, {"self": Shard(dim), "index": Shard(dim)}, Shard(dim))
    yield from _cut_picked(call, picked)
    yield from keep_terms(call, "self")


@rule(aten.index_select.default)
def cut_index_select(call: Call) -> Iterator[Strategy]:
    source = call["self"]
    if source.num_dims == 0 or call["index"].num_dims == 0:
        return
    picked = wrap(call["dim"], source.num_dims)
    for dim in range(source.num_dims):
        cuts = {"index": Shard(0)} if dim == picked else {"self": Shard(dim)}
        yield lay(call, cuts, Shard(dim))
    yield from _cut_picked(call, picked)
    yield from keep_terms(call, "self")


@rule(aten.take_along_dim.default)
def cut_take_along_dim(call: Call) -> Iterator[Strategy]:
    """As gather does, but the other dims broadcast. Without a dim it picks from all at once."""
    if call["dim"] is None:
        return
    whole, source, index = call.outputs[0], call["self"], call["indices"]
    picked = wrap(call["dim"], whole.num_dims)
    for dim in range(whole.num_dims):
        if dim == picked:
            yield lay(call, {"indices": Shard(dim)}, Shard(dim))
        elif whole.shape[dim] != 1:
            cuts = {
                "self": broadcast_cut(source, whole, dim),
                "indices": broadcast_cut(index, whole, dim),
            }
            yield lay(call, cuts, Shard(dim))
    yield from _cut_picked(call, picked)
    yield from keep_terms(call, "self")


def _cut_picked(call: Call, dim: int) -> Iterator[Strategy]:
    if can_pick_own(call, dim):
        yield lay(call, {"self": Shard(dim)}, Partial(), is_order_blind=False)


@speller(aten.gather.default, aten.take_along_dim.default)
def spell_gather(local: Local) -> Any:
    layout, name = local.input_layout("self"), _index_name(local)
    if local["dim"] is None:
        return local.repeat()
    dim = wrap(local["dim"], len(layout.shape))
    if not is_cut(layout, dim):
        return local.repeat()
    if layout.local_shape(local.seat)[dim] == 0:
        return write_zeros(local, local["self"])
    own, is_others = mask_others(local, local[name], layout=layout, dim=dim)
    return _write_masked(local, local.repeat(**{name: own}), is_others)


@speller(aten.index_select.default)
def spell_index_select(local: Local) -> Any:
    layout = local.input_layout("self")
    dim = wrap(local["dim"], len(layout.shape))
    if not is_cut(layout, dim):
        return local.repeat()
    if layout.local_shape(local.seat)[dim] == 0:
        return write_zeros(local, local["self"])
    own, is_others = mask_others(local, local["index"], layout=layout, dim=dim)
    shape = [-1] + [1] * (len(layout.shape) - 1 - dim)
    mask = local.pen.write(aten.reshape.default, is_others, shape)
    return _write_masked(local, local.repeat(index=own), mask)


def _index_name(local: Local) -> str:
    return "index" if "index" in local.arguments else "indices"


def _write_masked(local: Local, picked: Any, is_others: Any) -> Any:
    return local.pen.write(aten.masked_fill.Scalar, picked, is_others, 0)
