"""Rectangles that show which part of a tensor each rank of a mesh holds."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import product
from typing import NamedTuple, Self, final

from msgspec import Struct

from shardscope.record import (
    Axis,
    Recording,
    Stretches,
    TensorLayout,
    compress_ranks,
    cut_stretches,
    format_ranks,
)
from shardscope.record.units import plural
from shardscope.report.html.page_views import Drawing, ShardRectangle
from shardscope.report.model.holdings import (
    AxisSharding,
    describe_shardings,
    order_shardings,
    read_shardings,
)

_MAX_RANKS = 16_384  # ranks that are listed individually


@final
class Mesh:
    """The axes of a run, or of the mesh of a parallel program."""

    def __init__(self, recording: Recording, axes: Sequence[Axis]) -> None:
        self._sizes = {axis.name: axis.size for axis in axes}
        num_ranks = math.prod(self._sizes.values())
        has_all = num_ranks == recording.run.world_size and len(self._sizes) == len(axes)
        # If the mesh is smaller than the world, which ranks it contains is not known.
        self.is_numbered = bool(axes) and has_all and num_ranks <= _MAX_RANKS
        self._group_sizes = {
            group.axis: group.num_ranks for group in recording.groups if group.axis is not None
        }

    def size(self, axis: str) -> int | None:
        """Return the number of ranks along an axis; for a flattened axis, the size of its group."""
        return self._sizes.get(axis, self._group_sizes.get(axis))

    def name_holders(self, at: Mapping[str, int], *, among: Collection[int] | None = None) -> str:
        """Name the ranks at mesh coordinates, or the coordinates if the ranks are unknown."""
        if not self.is_numbered or any(axis not in self._sizes for axis in at):
            return ", ".join(f"{axis} {index}" for axis, index in at.items()) or "all"
        ranks = (rank for rank in self._find(at) if among is None or rank in among)
        return format_ranks(compress_ranks(ranks))

    def find_neighbours(self, rank: int, axes: Collection[str]) -> frozenset[int] | None:
        """Find ranks that differ from `rank` along these axes alone; None if that is all ranks."""
        fixed_axes = [axis for axis in self._sizes if axis not in axes]
        if not self.is_numbered or not fixed_axes:
            return None
        at = {}
        for axis in reversed(self._sizes):
            rank, index = divmod(rank, self._sizes[axis])
            if axis in fixed_axes:
                at[axis] = index
        return frozenset(self._find(at))

    def _find(self, at: Mapping[str, int]) -> Iterator[int]:
        index_choices = [
            [at[axis]] if axis in at else range(size) for axis, size in self._sizes.items()
        ]
        for coordinate in product(*index_choices):
            rank = 0
            for index, size in zip(coordinate, self._sizes.values(), strict=True):
                rank = rank * size + index
            yield rank


MAX_SHARDS = 64
_DIGITS = 6  # decimals of a fraction: a millionth of a screen


class Part(Struct, frozen=True):
    """The part of a tensor that a set of ranks holds: index ranges of each dim."""

    ranks: str
    stretches: tuple[Stretches, ...]

    def length(self, dim: int) -> int:
        """Return the number of indices along a dim."""
        return sum(stop - start for start, stop in self.stretches[dim])


class _Extent(NamedTuple):
    """The extent of a rectangle along one side, as fractions and as an index expression."""

    start: float
    length: float
    written: str


@final
class Sides:
    """The dims that a picture shows horizontally and vertically; None for no dim."""

    def __init__(
        self, shape: tuple[int, ...], *, vertical: int | None, horizontal: int | None
    ) -> None:
        self.shape = shape
        self.vertical = vertical
        self.horizontal = horizontal

    @classmethod
    def choose(cls, shape: tuple[int, ...], parts: Sequence[Part]) -> Self:
        """Choose the last two sharded dims; if there are fewer, add the last unsharded dims."""
        dims = range(len(shape))
        sharded_dims = [dim for dim in dims if len({part.stretches[dim] for part in parts}) > 1]
        unsharded = [dim for dim in dims if dim not in sharded_dims]
        chosen = (
            sorted([*sharded_dims[-2:], *unsharded[::-1]][:2])
            if len(sharded_dims) < 2
            else sharded_dims[-2:]
        )
        vertical, horizontal = [None, None, *chosen][-2:]
        return cls(shape, vertical=vertical, horizontal=horizontal)

    def name(self, dim: int | None) -> str:
        """`dim 1: 4096`."""
        return "" if dim is None else f"dim {dim}: {self.shape[dim]}"

    def extents(self, part: Part, dim: int | None) -> Iterator[_Extent]:
        """Yield the extents of the part along a dim."""
        if dim is None:
            yield _Extent(0.0, 1.0, "")
            return
        size = self.shape[dim]
        for start, stop in part.stretches[dim]:
            if start < stop:
                share = (stop - start) / size
                yield _Extent(start / size, share, _write_index(((start, stop),), size))

    def write_indices(self, part: Part, rows: _Extent, columns: _Extent) -> str:
        """Format the part as a Python index: `[0:512, :]`."""
        shown = {self.vertical: rows.written, self.horizontal: columns.written}
        written = [
            shown.get(dim) or _write_index(part.stretches[dim], size)
            for dim, size in enumerate(self.shape)
        ]
        return f"[{', '.join(written)}]"


def _write_index(stretches: Stretches, size: int) -> str:
    if stretches == ((0, size),):
        return ":"
    return " and ".join(f"{start}:{stop}" for start, stop in stretches)


def make_rectangles(sides: Sides, parts: Sequence[Part]) -> tuple[ShardRectangle, ...]:
    """Make a rectangle for each index range of each part; equal rectangles are merged."""
    rectangles: dict[tuple[_Extent, _Extent], tuple[int, str, list[str]]] = {}
    for color, part in enumerate(parts):
        if any(part.length(dim) == 0 for dim in range(len(sides.shape))):
            continue
        for rows, columns in product(
            sides.extents(part, sides.vertical), sides.extents(part, sides.horizontal)
        ):
            indices = sides.write_indices(part, rows, columns)
            _, _, ranks = rectangles.setdefault((rows, columns), (color, indices, []))
            ranks.append(part.ranks)
    return tuple(
        ShardRectangle(
            left=round(columns.start, _DIGITS),
            top=round(rows.start, _DIGITS),
            width=round(columns.length, _DIGITS),
            height=round(rows.length, _DIGITS),
            ranks=",".join(ranks),
            indices=indices if len(ranks) == 1 else f"{indices} and more",
            color=color,
        )
        for (rows, columns), (color, indices, ranks) in rectangles.items()
    )


def describe_sizes(shape: tuple[int, ...], parts: Sequence[Part]) -> str:
    """Describe parts of unequal size; the empty string if all are equal."""
    if 0 in shape:
        return "It has no elements."
    sentences = []
    for dim in range(len(shape)):
        lengths = Counter(part.length(dim) for part in parts)
        if len(lengths) > 1:
            sizes = " and ".join(
                f"{length:,}" for length in sorted(lengths, reverse=True) if length
            )
            empty = f"; {plural(lengths[0], 'empty shard')}" if lengths[0] else ""
            sentences.append(f"Dim {dim} is sharded unevenly, in shards of {sizes}{empty}.")
    return " ".join(sentences)


def draw_placements(
    shape: tuple[int, ...],
    placements: Sequence[str],
    axes: Sequence[str],
    mesh: Mesh,
    *,
    among: frozenset[int] | None = None,
) -> Drawing:
    """Draw a tensor from its placements, one for each of the axes.

    `among` are the ranks that may hold a part of it; None for all ranks.
    """
    sizes = {axis: mesh.size(axis) for axis in axes}
    shardings = read_shardings([(axis, sizes[axis] or 0) for axis in axes], placements, len(shape))
    if not all(sizes.values()):
        return _draw(shape, shardings, [], note="The number of ranks of its mesh is not known.")
    ordered = order_shardings(shardings)
    drawn = _choose_drawn_axes(ordered)
    if ordered and not drawn:
        return _draw(
            shape,
            shardings,
            [],
            note=_explain_many(math.prod(sharding.size for sharding in ordered)),
        )
    parts = []
    for coordinate in product(*(range(sharding.size) for sharding in drawn)):
        at = {sharding.axis: index for sharding, index in zip(drawn, coordinate, strict=True)}
        parts.append(Part(mesh.name_holders(at, among=among), _find_local_ranges(shape, drawn, at)))
    finer = " and ".join(
        f"in {sharding.size:,} along {sharding.axis}"
        for sharding in ordered
        if sharding not in drawn
    )
    return _draw(
        shape, shardings, parts, note=f"Each shard is split further {finer}." if finer else ""
    )


def draw_layout(layout: TensorLayout) -> Drawing:
    """Draw a tensor whose slices were recorded."""
    sizes = [(axis.name, axis.size) for axis in layout.axes]
    shardings = read_shardings(sizes, layout.placements, len(layout.shape))
    num_dims = len(layout.shape)
    slices = [shard for shard in layout.slices if len(shard.stretches) == num_dims]
    if len(slices) > MAX_SHARDS:
        return _draw(layout.shape, shardings, [], note=_explain_many(len(slices)))
    parts = [Part(format_ranks(shard.ranks), shard.stretches) for shard in slices]
    return _draw(layout.shape, shardings, parts)


def _explain_many(num_parts: int) -> str:
    return f"{num_parts:,} shards are too many to draw."


def _choose_drawn_axes(shardings: Sequence[AxisSharding]) -> list[AxisSharding]:
    """Choose shardings until there are few enough shards; the last sharding of a dim goes first."""
    drawn = list(shardings)
    while math.prod(sharding.size for sharding in drawn) > MAX_SHARDS:
        last = {sharding.dim: sharding for sharding in drawn}
        drawn.remove(max(last.values(), key=lambda sharding: sharding.size))
    return drawn


def _find_local_ranges(
    shape: tuple[int, ...], shardings: Sequence[AxisSharding], at: dict[str, int]
) -> tuple[Stretches, ...]:
    """Return the index ranges of each dim at the mesh coordinate `at`."""
    spans: list[Stretches] = [((0, size),) for size in shape]
    for sharding in shardings:
        if sharding.dim is not None:
            spans[sharding.dim] = cut_stretches(
                spans[sharding.dim], sharding.size, at[sharding.axis]
            )
    return tuple(spans)


def _draw(
    shape: tuple[int, ...],
    shardings: Sequence[AxisSharding],
    parts: Sequence[Part],
    *,
    note: str = "",
) -> Drawing:
    sides = Sides.choose(shape, parts)
    rectangles = make_rectangles(sides, parts)
    if len(rectangles) > MAX_SHARDS:
        rectangles, note = (), _explain_many(len(rectangles))
    return Drawing(
        shape=shape,
        placements=tuple(sharding.placement for sharding in shardings),
        axes=tuple(sharding.axis for sharding in shardings),
        description=describe_shardings(shardings, len(shape)),
        horizontal=sides.name(sides.horizontal),
        vertical=sides.name(sides.vertical),
        shards=rectangles,
        note=" ".join(filter(None, (note, describe_sizes(shape, parts)))),
    )
