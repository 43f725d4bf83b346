"""Parts of a dim: slices, selections and splits, also of dims that are cut in blocks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

import torch

from shardscope.parallel.layouts import Layout
from shardscope.parallel.placements import Partial, Placement, Shard, Size
from shardscope.parallel.rules.book import rule, speller
from shardscope.parallel.rules.call import Call, Strategy
from shardscope.parallel.rules.dims import wrap
from shardscope.parallel.rules.local import Local
from shardscope.parallel.rules.pieces import is_cut, local_index
from shardscope.parallel.rules.terms import (
    blocks_of,
    can_add,
    keep_terms,
    lay,
    offered_to,
    shard_of,
)

__all__ = ["cut_select", "cut_slice", "cut_split", "cut_unbind"]

aten = torch.ops.aten

_END = 2**63 - 1

_SLICES = (aten.slice.Tensor, aten.narrow.default)
_SPLITS = (
    aten.split.Tensor,
    aten.split.sizes,
    aten.split_with_sizes.default,
    aten.chunk.default,
    aten.tensor_split.sections,
    aten.tensor_split.indices,
    aten.unsafe_split.Tensor,
    aten.unsafe_split_with_sizes.default,
    aten.unsafe_chunk.default,
)


@rule(*_SLICES)
def cut_slice(call: Call) -> Iterator[Strategy]:
    dim, (offer,) = _dim(call), offered_to(call, "self")
    is_all = not call["start"] and call.outputs[0].shape[dim] == call["self"].shape[dim]
    for other in range(call["self"].num_dims):
        if other != dim or is_all:
            yield lay(call, {"self": Shard(other)}, Shard(other))
    yield from keep_terms(call, "self")
    if is_all or not isinstance(offer, Shard) or offer.dim != dim:
        return
    bounds = _bounds(call)
    if bounds is not None:
        if not _is_from_the_end(call):  # those that it counts from may be a later axis's
            yield from _cut_parts(call, offer, [bounds])
        if offer.is_plain and can_add(call["self"]) and _is_worth_terms(call, bounds):
            yield lay(call, {"self": offer}, Partial(), is_order_blind=False)


@rule(*_SPLITS)
def cut_split(call: Call) -> Iterator[Strategy]:
    dim, (offer,) = _dim(call), offered_to(call, "self")
    for other in range(call["self"].num_dims):
        if other != dim:
            yield lay(call, {"self": Shard(other)}, Shard(other))
    yield from keep_terms(call, "self")
    if isinstance(offer, Shard) and offer.dim == dim:
        ends = list(accumulate(one.shape[dim] for one in call.outputs))
        yield from _cut_parts(call, offer, list(zip([0, *ends], ends, strict=False)))


def _dim(call: Call) -> int:
    return wrap(call["dim"], call["self"].num_dims)


def _bounds(call: Call) -> tuple[int, int] | None:
    """Where the slice begins and ends; None where that is open, or some are left out.

    Sizes are those that earlier axes left, but bounds are the whole's: where they do not fit
    each other, the dim has been cut before.
    """
    size: Size = call["self"].shape[_dim(call)]
    start: Any = call["start"] or 0
    if "length" in call.arguments:
        end, step = start + call["length"], 1
    else:
        end, step = (_END if call["end"] is None else call["end"]), call["step"]
    if step != 1 or not all(isinstance(one, int) for one in (size, start, end)):
        return None
    start, end = (one + size if one < 0 else one for one in (start, end))
    end = size if end == _END else end
    is_fitting = 0 <= start <= end <= size and end - start == call.outputs[0].shape[_dim(call)]
    return (start, end) if is_fitting else None


def _is_from_the_end(call: Call) -> bool:
    return call["start"] is not None and call["start"] < 0


def _is_worth_terms(call: Call, bounds: tuple[int, int]) -> bool:
    """Addends are summed at twice the price of gathering, so the slice has to be a small part.

    And one that a later axis cannot take for a slice of the first rank's piece.
    """
    size, (start, end) = call["self"].shape[_dim(call)], bounds
    is_in_first_piece = not _is_from_the_end(call) and end * call.num_ranks <= size
    return bool(2 * (end - start) <= size) and not is_in_first_piece


def _cut_parts(call: Call, offer: Shard, bounds: Sequence[tuple[Any, Any]]) -> Iterator[Strategy]:
    """Whole blocks of a dim that is cut in blocks: every rank has its piece of each."""
    blocks = blocks_of(offer, call["self"].shape[offer.dim])
    if blocks is None:
        return
    edges = [0, *accumulate(blocks)]
    if all(edge in edges for pair in bounds for edge in pair):
        parts: list[Placement] = [
            shard_of(offer.dim, blocks[edges.index(start) : edges.index(end)])
            for start, end in bounds
        ]
        yield lay(call, {"self": offer}, parts, is_order_blind=False)


@speller(*_SLICES)
def spell_slice(local: Local) -> Any:
    dim, layout = _dim(local.call), local.input_layout("self")
    if not is_cut(layout, dim):
        return local.repeat()
    if layout.shape[dim] == local.outputs[0].shape[dim]:
        return local.pen.write(aten.slice.Tensor, local["self"], dim, 0, _END)
    bounds = _bounds(local.call)
    assert bounds is not None
    if any(isinstance(one, Partial) for one in _along(layout, dim, local.outputs[0])):
        return _write_own_part(local, bounds)
    start, end = (local_index(layout, dim, index=one, seat=local.seat) for one in bounds)
    return local.pen.write(aten.slice.Tensor, local["self"], dim, start, end)


def _along(layout: Layout, dim: int, other: Layout) -> list[Placement]:
    """How another tensor lies along the axes that cut this one's dim."""
    return [
        theirs
        for ours, theirs in zip(layout.placements, other.placements, strict=True)
        if isinstance(ours, Shard) and ours.dim == dim
    ]


def _write_own_part(local: Local, bounds: tuple[int, int]) -> Any:
    """What of the slice lies on this rank, with zeros for the rest."""
    dim, layout = _dim(local.call), local.input_layout("self")
    first = layout.start(dim, local.seat)
    last = first + layout.local_shape(local.seat)[dim]
    start = min(max(bounds[0], first), bounds[1])
    end = max(min(bounds[1], last), start)
    own = local.pen.write(aten.slice.Tensor, local["self"], dim, start - first, end - first)
    dims_behind = len(layout.shape) - 1 - dim
    padding = [0] * (2 * dims_behind) + [start - bounds[0], bounds[1] - end]
    return local.pen.write(aten.constant_pad_nd.default, own, padding)


@speller(*_SPLITS)
def spell_split(local: Local) -> Any:
    dim = _dim(local.call)
    if not is_cut(local.input_layout("self"), dim):
        return local.repeat()
    sizes = [local.output_shape(index)[dim] for index in range(len(local.outputs))]
    return local.pen.write(aten.split_with_sizes.default, local["self"], sizes, dim)


@rule(aten.select.int)
def cut_select(call: Call) -> Iterator[Strategy]:
    dim = _dim(call)
    yield from _cut_other_dims(call, dim)
    is_known = isinstance(call["self"].shape[dim], int) and isinstance(call["index"], int)
    if is_known and can_add(call["self"]):
        yield lay(call, {"self": Shard(dim)}, Partial(), is_order_blind=False)


@rule(aten.unbind.int)
def cut_unbind(call: Call) -> Iterator[Strategy]:
    yield from _cut_other_dims(call, _dim(call))


def _cut_other_dims(call: Call, dim: int) -> Iterator[Strategy]:
    for other in range(call["self"].num_dims):
        if other != dim:
            yield lay(call, {"self": Shard(other)}, Shard(other - (other > dim)))
    yield from keep_terms(call, "self")


@speller(aten.select.int)
def spell_select(local: Local) -> Any:
    """The rank that holds the index gives what is there, the others give zeros."""
    dim, layout = _dim(local.call), local.input_layout("self")
    if not is_cut(layout, dim):
        return local.repeat()
    start, size = layout.start(dim, local.seat), layout.local_shape(local.seat)[dim]
    own = wrap(local["index"], layout.shape[dim]) - start
    if 0 <= own < size:
        return local.repeat(index=own)
    nothing = local.pen.write(aten.slice.Tensor, local["self"], dim, 0, 0)
    return local.pen.write(aten.sum.dim_IntList, nothing, [dim], dtype=local.call.outputs[0].dtype)
