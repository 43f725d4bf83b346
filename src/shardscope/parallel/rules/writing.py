"""A part of a tensor written over: what in-place writes become in a program without them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from shardscope.parallel.placements import Shard, Size
from shardscope.parallel.rules.book import rule, speller
from shardscope.parallel.rules.call import Call, Strategy
from shardscope.parallel.rules.dims import can_be_cut, wrap
from shardscope.parallel.rules.local import Local
from shardscope.parallel.rules.pieces import is_cut
from shardscope.parallel.rules.terms import broadcast_cut, keep_terms, lay, offered_to

__all__ = [
    "cut_copy",
    "cut_select_scatter",
    "cut_slice_scatter",
    "spell_select_scatter",
    "spell_slice_scatter",
]

aten = torch.ops.aten

_END = 2**63 - 1


@rule(aten.select_scatter.default)
def cut_select_scatter(call: Call) -> Iterator[Strategy]:
    """Along the dim that is written to, the rank that holds the index writes."""
    along = wrap(call["dim"], call["self"].num_dims)
    for dim in range(call["self"].num_dims):
        if dim != along:
            source = Shard(dim - (dim > along))
            yield lay(call, {"self": Shard(dim), "src": source}, Shard(dim))
    yield from _cut_written(call, along)
    yield from keep_terms(call, "self", "src")


@rule(aten.slice_scatter.default)
def cut_slice_scatter(call: Call) -> Iterator[Strategy]:
    """Along the dim that is written to, each rank writes what falls into its piece."""
    along = wrap(call["dim"], call["self"].num_dims)
    for dim in range(call["self"].num_dims):
        if dim != along:
            yield lay(call, {"self": Shard(dim), "src": Shard(dim)}, Shard(dim))
    if call["step"] == 1:
        yield from _cut_written(call, along)
    yield from keep_terms(call, "self", "src")


def _cut_written(call: Call, along: int) -> Iterator[Strategy]:
    names = [name for name in ("start", "end", "index") if call.arguments.get(name) is not None]
    sizes: list[Size] = [call["self"].shape[along], *(call[name] for name in names)]
    if all(isinstance(one, int) for one in sizes):
        yield lay(call, {"self": Shard(along)}, Shard(along), is_order_blind=False)


@speller(aten.select_scatter.default)
def spell_select_scatter(local: Local) -> Any:
    layout = local.input_layout("self")
    dim = wrap(local["dim"], len(layout.shape))
    if not is_cut(layout, dim):
        return local.repeat()
    index = wrap(local["index"], layout.shape[dim]) - layout.start(dim, local.seat)
    if 0 <= index < layout.local_shape(local.seat)[dim]:
        return local.repeat(index=index)
    return local.pen.write(aten.clone.default, local["self"])


@speller(aten.slice_scatter.default)
def spell_slice_scatter(local: Local) -> Any:
    layout = local.input_layout("self")
    dim = wrap(local["dim"], len(layout.shape))
    if not is_cut(layout, dim):
        return local.repeat()
    start, end = _bounds(local, layout.shape[dim])
    first = layout.start(dim, local.seat)
    last = first + layout.local_shape(local.seat)[dim]
    own_start = min(max(start, first), last)
    own_end = max(min(end, last), own_start)
    source = local.pen.write(
        aten.slice.Tensor, local["src"], dim, own_start - start, own_end - start
    )
    return local.repeat(src=source, start=own_start - first, end=own_end - first)


def _bounds(local: Local, size: int) -> tuple[int, int]:
    start = local["start"] or 0
    end = _END if local["end"] is None else local["end"]
    start, end = (max(0, min(size, one + size if one < 0 else one)) for one in (start, end))
    return start, max(start, end)


@rule(aten.copy.default)
def cut_copy(call: Call) -> Iterator[Strategy]:
    """All of a tensor: nothing is left of what it held, so that may lie as it likes."""
    whole = call.outputs[0]
    for dim, size in enumerate(whole.shape):
        if can_be_cut(size):
            cuts = {"self": Shard(dim), "src": broadcast_cut(call["src"], whole, dim)}
            yield lay(call, cuts, Shard(dim))
    if call["src"].dtype == whole.dtype:
        for one in keep_terms(call, "src"):
            (offer,) = offered_to(call, "self")
            if not isinstance(offer, Shard):
                yield lay(call, {"self": offer, "src": one.outputs[0]}, one.outputs)
