"""How tensors lie on a mesh, as rectangles: what each rank holds, and where that is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product

from shardscope.record import Stretches, TensorLayout, cut_stretches, format_ranks
from shardscope.report.page.sharding import Drawing
from shardscope.report.page.views.holders import Mesh
from shardscope.report.page.views.pieces import MAX_PIECES, Part, Sides, cut_pieces, tell_sizes
from shardscope.report.placements import Cut, describe_cuts, order_cuts, read_cuts

__all__ = ["draw_layout", "draw_placements"]


def draw_placements(
    shape: tuple[int, ...],
    placements: Sequence[str],
    axes: Sequence[str],
    mesh: Mesh,
    *,
    among: frozenset[int] | None = None,
) -> Drawing:
    """A tensor that lies as its placements say, one for each of the axes.

    `among` are the ranks that may hold any of it, where those are not all.
    """
    sizes = {axis: mesh.size(axis) for axis in axes}
    cuts = read_cuts([(axis, sizes[axis] or 0) for axis in axes], placements, len(shape))
    if not all(sizes.values()):
        return _draw(shape, cuts, [], note="How many ranks its mesh has is not known.")
    cutting = order_cuts(cuts)
    drawn = _choose_drawn(cutting)
    if cutting and not drawn:
        return _draw(shape, cuts, [], note=_explain_many(math.prod(cut.size for cut in cutting)))
    parts = []
    for coordinate in product(*(range(cut.size) for cut in drawn)):
        at = {cut.axis: place for cut, place in zip(drawn, coordinate, strict=True)}
        parts.append(Part(mesh.name_holders(at, among=among), _hold(shape, drawn, at)))
    finer = " and ".join(f"in {cut.size:,} along {cut.axis}" for cut in cutting if cut not in drawn)
    return _draw(shape, cuts, parts, note=f"Each shard is split further {finer}." if finer else "")


def draw_layout(layout: TensorLayout) -> Drawing:
    """A tensor whose slices are known."""
    sizes = [(axis.name, axis.size) for axis in layout.axes]
    cuts = read_cuts(sizes, layout.placements, len(layout.shape))
    num_dims = len(layout.shape)
    slices = [one for one in layout.slices if len(one.stretches) == num_dims]
    if len(slices) > MAX_PIECES:
        return _draw(layout.shape, cuts, [], note=_explain_many(len(slices)))
    parts = [Part(format_ranks(one.ranks), one.stretches) for one in slices]
    return _draw(layout.shape, cuts, parts)


def _explain_many(num_parts: int) -> str:
    return f"{num_parts:,} pieces are too many to draw."


def _choose_drawn(cutting: Sequence[Cut]) -> list[Cut]:
    """As many of them as a picture has room for: of each dim, the last to cut goes first."""
    drawn = list(cutting)
    while math.prod(cut.size for cut in drawn) > MAX_PIECES:
        last = {cut.dim: cut for cut in drawn}
        drawn.remove(max(last.values(), key=lambda cut: cut.size))
    return drawn


def _hold(shape: tuple[int, ...], cuts: Sequence[Cut], at: dict[str, int]) -> tuple[Stretches, ...]:
    """Each cuts what those before it left."""
    held: list[Stretches] = [((0, size),) for size in shape]
    for cut in cuts:
        if cut.dim is not None:
            held[cut.dim] = cut_stretches(held[cut.dim], cut.size, at[cut.axis])
    return tuple(held)


def _draw(
    shape: tuple[int, ...], cuts: Sequence[Cut], parts: Sequence[Part], *, note: str = ""
) -> Drawing:
    sides = Sides.choose(shape, parts)
    pieces = cut_pieces(sides, parts)
    if len(pieces) > MAX_PIECES:
        pieces, note = (), _explain_many(len(pieces))
    return Drawing(
        shape=shape,
        placements=tuple(cut.placement for cut in cuts),
        axes=tuple(cut.axis for cut in cuts),
        words=describe_cuts(cuts, len(shape)),
        horizontal=sides.name(sides.horizontal),
        vertical=sides.name(sides.vertical),
        pieces=pieces,
        note=" ".join(filter(None, (note, tell_sizes(shape, parts)))),
    )
