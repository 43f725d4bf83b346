"""Data of the sharding view: parameters in columns, and a drawing for each layout."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import product
from typing import NamedTuple, Self, final

from msgspec import Struct

from shardscope.record import (
    Axis,
    Module,
    Parameter,
    RankSpan,
    Recording,
    Stretches,
    TensorLayout,
    compress_ranks,
    count_ranks,
    cut_stretches,
    expand_ranks,
    format_ranks,
)
from shardscope.record.layer_names import fold_layers
from shardscope.record.units import plural
from shardscope.report.html.page_index import NOWHERE, Index
from shardscope.report.html.page_views import (
    Drawing,
    LayoutRow,
    Parameters,
    ShardingTable,
    ShardRectangle,
)
from shardscope.report.model.holdings import (
    AxisSharding,
    describe_shardings,
    list_parameters,
    order_shardings,
    read_shardings,
    sum_holdings,
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


_TIMES = re.compile(r" \(×\d+\)$")


class _Row(NamedTuple):
    """A parameter with its module and full name."""

    module: int
    name: str
    parameter: Parameter
    drawing: int
    ranks: str
    placement: str


def make_sharding(recording: Recording, index: Index) -> ShardingTable | None:
    """Make the view, or None if no parameters and no layouts were recorded."""
    drawings = _Drawings(recording)
    rows = list(_list_rows(recording, index, drawings))
    layouts = tuple(
        LayoutRow(name=layout.name or "Tensor", drawing=drawings.add(draw_layout(layout)))
        for layout in recording.layouts
    )
    if not rows and not layouts:
        return None
    holdings = sum_holdings(recording)
    return ShardingTable(
        parameters=_make_columns(rows, recording),
        drawings=drawings.all(),
        global_bytes=holdings and holdings.global_bytes,
        local_bytes=holdings and holdings.local_bytes,
        replicated_bytes=holdings and holdings.replicated_bytes,
        layouts=layouts,
    )


@final
class _Drawings:
    """The distinct drawings; parameters with the same placements share a drawing."""

    def __init__(self, recording: Recording) -> None:
        self._mesh = Mesh(recording, recording.run.axes)
        self._holders = _Holders(recording, self._mesh)
        self._drawn: dict[Drawing, int] = {}
        self._known: dict[object, int] = {}

    def add(self, drawing: Drawing) -> int:
        return self._drawn.setdefault(drawing, len(self._drawn))

    def all(self) -> tuple[Drawing, ...]:
        return tuple(self._drawn)

    def draw(self, module: Module, parameter: Parameter) -> int:
        if not parameter.placements or "Varying" in parameter.placements:
            return NOWHERE
        among = self._holders.find(module, parameter)
        key = (parameter.shape, parameter.placements, parameter.axes, among)
        if key not in self._known:
            drawing = draw_placements(
                parameter.shape, parameter.placements, parameter.axes, self._mesh, among=among
            )
            self._known[key] = self.add(drawing)
        return self._known[key]


@final
class _Holders:
    """Finds ranks that may hold a part of a parameter: a pipeline stage has its own modules."""

    def __init__(self, recording: Recording, mesh: Mesh) -> None:
        self._world_size = recording.run.world_size
        self._mesh = mesh
        self._forms: defaultdict[str, set[tuple[RankSpan, ...]]] = defaultdict(set)
        self._has_all = count_ranks(recording.run.ranks) == recording.run.world_size
        for module in recording.modules:
            self._forms[module.name].add(module.ranks)
        self._cache: dict[object, frozenset[int] | None] = {}

    def find(self, module: Module, parameter: Parameter) -> frozenset[int] | None:
        """Return the ranks, or None for all. Cached, as modules share few sets of ranks."""
        if not self._mesh.is_numbered:
            return None
        first = next(iter(module.ranks), RankSpan(0)).first
        key = frozenset(self._forms[module.name]) if self._has_all else (first, parameter.axes)
        if key not in self._cache:
            self._cache[key] = self._find_holders(module, parameter, first)
        return self._cache[key]

    def _find_holders(
        self, module: Module, parameter: Parameter, first: int
    ) -> frozenset[int] | None:
        if not self._has_all:
            return self._mesh.find_neighbours(first, parameter.axes)
        forms = self._forms[module.name]
        ranks = frozenset(rank for spans in forms for rank in expand_ranks(spans))
        return None if len(ranks) == self._world_size else ranks


def _list_rows(recording: Recording, index: Index, drawings: _Drawings) -> Iterator[_Row]:
    for module, parameter, name in list_parameters(recording):
        yield _Row(
            index.module(module.name),
            name,
            parameter,
            drawings.draw(module, parameter),
            format_ranks(module.ranks),
            _describe_placement(parameter, recording.run.world_size),
        )


def _describe_placement(parameter: Parameter, world_size: int) -> str:
    if parameter.placements:
        placed = zip(parameter.axes, parameter.placements, strict=False)
        words = ", ".join(f"{axis}: {placement}" for axis, placement in placed)
        return f"{words} (annotated with spmd_types)" if parameter.is_annotated else words
    if parameter.fsdp_group is not None:
        return "flattened with the others of its FSDP group"
    return "not distributed" if world_size > 1 else "not sharded"


def _make_columns(rows: Sequence[_Row], recording: Recording) -> Parameters:
    flags = _gather_flags(recording)
    parameters = [row.parameter for row in rows]
    return Parameters(
        module=tuple(row.module for row in rows),
        name=tuple(row.name for row in rows),
        shape=tuple(_format_shape(parameter.shape) for parameter in parameters),
        local_shape=tuple(_format_shape(parameter.local_shape) for parameter in parameters),
        dtype=tuple(parameter.dtype for parameter in parameters),
        drawing=tuple(row.drawing for row in rows),
        placement=tuple(row.placement for row in rows),
        global_bytes=tuple(parameter.global_bytes for parameter in parameters),
        local_bytes=tuple(parameter.local_bytes for parameter in parameters),
        is_trainable=tuple(parameter.is_trainable for parameter in parameters),
        is_buffer=tuple(parameter.is_buffer for parameter in parameters),
        rule=tuple(parameter.rule or "" for parameter in parameters),
        fsdp_group=tuple(_name_group(parameter) for parameter in parameters),
        alias_group=tuple(parameter.alias_group or "" for parameter in parameters),
        live_name=tuple(parameter.live_name or "" for parameter in parameters),
        checkpoint_key=tuple(parameter.checkpoint_key or "" for parameter in parameters),
        ranks=tuple(row.ranks for row in rows),
        flags=tuple(", ".join(_find_flags(row.name, flags)) for row in rows),
    )


def _format_shape(shape: tuple[int, ...]) -> str:
    return " × ".join(map(str, shape)) if shape else "a number"


def _name_group(parameter: Parameter) -> str:
    if parameter.fsdp_group is None:
        return ""
    return parameter.fsdp_group or "(root)"


def _gather_flags(recording: Recording) -> dict[str, dict[str, None]]:
    """Map names or patterns of parameters to the rules of findings about them."""
    flags: defaultdict[str, dict[str, None]] = defaultdict(dict)
    for finding in recording.findings:
        for name in finding.subject.split(", "):
            flags[_TIMES.sub("", name)][finding.rule] = None
    return dict(flags)


def _find_flags(name: str, flags: dict[str, dict[str, None]]) -> Iterator[str]:
    yield from {**flags.get(name, {}), **flags.get(fold_layers(name), {})}
