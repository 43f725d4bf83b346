"""Writes to a part of a dim that is cut: each rank writes what falls into its piece."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from shardscope.parallel.placements import Shard, Size
from shardscope.parallel.rules.book import speller
from shardscope.parallel.rules.call import Call, Strategy
from shardscope.parallel.rules.dims import wrap
from shardscope.parallel.rules.local import Local
from shardscope.parallel.rules.pieces import is_cut
from shardscope.parallel.rules.terms import lay

__all__ = ["cut_written", "spell_select_scatter", "spell_slice_scatter"]

aten = torch.ops.aten

_END = 2**63 - 1


def cut_written(call: Call, along: int) -> Iterator[Strategy]:
    """The dim that is written to, cut; all ranks have all that is written."""
    names = [name for name in ("start", "end", "index") if call.arguments.get(name) is not None]
    sizes: list[Size] = [call["self"].shape[along], *(call[name] for name in names)]
    is_known = all(isinstance(one, int) for one in sizes)
    if is_known and ("index" in names or _is_part(call, along)):
        yield lay(call, {"self": Shard(along)}, Shard(along), is_order_blind=False)


def _is_part(call: Call, along: int) -> bool:
    """Whether it is a slice of some of the dim, also in the eyes of axes before and after.

    Sizes are those that earlier axes left, but bounds are the whole's. A slice as large as what is
    left, or as what will be left, could be taken for all of it.
    """
    size, piece = call["self"].shape[along], -(-call["self"].shape[along] // call.num_ranks)
    return call["step"] == 1 and call["src"].shape[along] not in (size, piece)


@speller(aten.select_scatter.default)
def spell_select_scatter(local: Local) -> Any:
    """As a slice of one index; elsewhere of none, so that what is written has a gradient there."""
    layout = local.input_layout("self")
    dim = wrap(local["dim"], len(layout.shape))
    if not is_cut(layout, dim):
        return local.repeat()
    index = wrap(local["index"], layout.shape[dim]) - layout.start(dim, local.seat)
    is_here = 0 <= index < layout.local_shape(local.seat)[dim]
    start, end = (index, index + 1) if is_here else (0, 0)
    write = local.pen.write
    source = write(aten.unsqueeze.default, local["src"], dim)
    part = write(aten.slice.Tensor, source, dim, 0, end - start)
    return write(aten.slice_scatter.default, local["self"], part, dim, start, end)


@speller(aten.slice_scatter.default)
def spell_slice_scatter(local: Local) -> Any:
    layout = local.input_layout("self")
    dim = wrap(local["dim"], len(layout.shape))
    if not is_cut(layout, dim):
        return local.repeat()
    if is_cut(local.input_layout("src"), dim):  # all of the dim is written
        return local.repeat(start=0, end=_END)
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
