"""Which rank holds which slice of a tensor, as a drawing and as a table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import final

from msgspec import Struct
from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from shardscope.record import Parameter, Recording, Slice, TensorLayout, format_ranks
from shardscope.record.layer_names import fold_layers_in_text
from shardscope.record.text import sanitize_text
from shardscope.record.units import format_bytes, plural
from shardscope.report.model.holdings import read_shardings
from shardscope.report.model.traffic_totals import sum_known
from shardscope.report.text.heading import name_holder
from shardscope.report.text.style import make_text, make_title, shorten
from shardscope.report.text.table import Column, ColumnStyle, Grid, Row

_MAX_DRAWINGS = 12
_MAX_DRAWN_ROWS = 4
_MAX_COLUMNS = 8
_WIDTH = 2 * _MAX_COLUMNS + 1
_LOCAL_SHARD, _REMOTE_SHARD = "■", "□"


class _PlacementGroup(Struct, frozen=True):
    """Placements that several parameters share: number of shards per dim, and mesh axes."""

    parts: tuple[int, ...]
    placements: tuple[str, ...]
    axes: tuple[str, ...]


class _Users(Struct):
    """The parameters of a placement group."""

    names: dict[str, None]
    sizes: list[int | None]  # of each, on one rank

    @property
    def num_bytes(self) -> int | None:
        """Sum the local bytes of all parameters; None if any is not known."""
        return sum_known(self.sizes)


def render_drawings(recording: Recording) -> Iterator[RenderableType]:
    """Render a drawing for each placement group, most bytes first."""
    groups = sorted(_gather(recording).items(), key=lambda item: -(item[1].num_bytes or 0))
    if not groups:
        return
    yield make_title("Placements", f"{_LOCAL_SHARD} on one rank, {_REMOTE_SHARD} on other ranks")
    for group, users in groups[:_MAX_DRAWINGS]:
        yield _draw_layout(group, users, name_holder(recording.run))
    if len(groups) > _MAX_DRAWINGS:
        yield Text(f"… {len(groups) - _MAX_DRAWINGS:,} more, in the table below", "dim")


def _gather(recording: Recording) -> dict[_PlacementGroup, _Users]:
    sizes = {axis.name: axis.size for axis in recording.run.axes}
    groups: dict[_PlacementGroup, _Users] = {}
    for module in recording.modules:
        for parameter in module.parameters:
            if parameter.placements and "Varying" not in parameter.placements:
                group = _PlacementGroup(
                    _count_parts(parameter, sizes), parameter.placements, parameter.axes
                )
                users = groups.setdefault(group, _Users({}, []))
                users.names[fold_layers_in_text(f"{module.name}.{parameter.name}".lstrip("."))] = (
                    None
                )
                users.sizes.append(parameter.local_bytes)
    return groups


def _count_parts(parameter: Parameter, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Count the shards along each dim, from the mesh or else from the local shape."""
    axes = [(axis, sizes.get(axis, 0)) for axis in parameter.axes]
    parts = [1] * len(parameter.shape)
    for sharding in read_shardings(axes, parameter.placements, len(parameter.shape)):
        if sharding.dim is not None:
            parts[sharding.dim] *= sharding.size
    return tuple(parts) if all(parts) else _compare_shapes(parameter)


def _compare_shapes(parameter: Parameter) -> tuple[int, ...]:
    pairs = zip(parameter.shape, parameter.local_shape, strict=False)
    return tuple(
        -(-size // local_size) if size > 0 and local_size > 0 else 1 for size, local_size in pairs
    )


def _draw_layout(group: _PlacementGroup, users: _Users, holder: str) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True, width=_WIDTH)
    table.add_column(overflow="fold")
    table.add_row(_draw_shards(group.parts), _describe(group, users, holder))
    return table


def _draw_shards(parts: tuple[int, ...]) -> Text:
    """Draw shards: rows are the first sharded dim, columns the second; one sharded dim is a row."""
    counts = [count for count in parts if count > 1]
    rows, columns = (1, counts[0]) if len(counts) == 1 else (*counts, 1, 1)[:2]
    shown = min(columns, _MAX_COLUMNS)
    more = " …" if columns > shown else ""
    lines = []
    for row in range(min(rows, _MAX_DRAWN_ROWS)):
        first = Text().append(
            _LOCAL_SHARD if row == 0 else _REMOTE_SHARD, "bold cyan" if row == 0 else "dim"
        )
        lines.append(first.append(" " + " ".join(_REMOTE_SHARD * (shown - 1)) + more, "dim"))
    if rows > _MAX_DRAWN_ROWS:
        lines.append(Text("⋮", "dim"))
    return Text("\n").join(lines)


def _describe(group: _PlacementGroup, users: _Users, holder: str) -> RenderableType:
    placed = zip(group.axes, group.placements, strict=False)
    head = make_text(", ".join(f"{axis}: {placement}" for axis, placement in placed), "bold")
    shard_counts = [f"dim {dim} in {count:,}" for dim, count in enumerate(group.parts) if count > 1]
    words = f"sharded: {' and '.join(shard_counts)}" if shard_counts else "replicated on every rank"
    size = users.num_bytes
    sizes_text = "sizes not recorded" if size is None else f"{format_bytes(size)} on {holder}"
    facts = f"{plural(len(users.sizes), 'parameter')}, {sizes_text}; {words}"
    names = list(users.names)
    rest = f" and {len(names) - 3:,} more" if len(names) > 3 else ""
    return Group(head, Text(facts), make_text(", ".join(names[:3]) + rest, "dim", width=160))


_MAX_SIDE = 16  # rows and columns of a picture
_MAX_ROWS = 64


def render_layout(layout: TensorLayout, *, is_complete: bool = False) -> Iterator[RenderableType]:
    """Render a title, then a drawing if two dims have few shards each, else a row per slice."""
    placed = zip(layout.axes, layout.placements, strict=False)
    mesh = ", ".join(f"{axis.name}={axis.size}: {placement}" for axis, placement in placed)
    shape = "×".join(map(str, layout.shape)) or "a number"
    name, facts = sanitize_text(layout.name or "Tensor"), sanitize_text(f"{shape} · {mesh}")
    yield make_title(shorten(name, 120), shorten(facts, 200))
    sharded_dims = [dim for dim in range(len(layout.shape)) if _is_sharded(layout, dim)]
    table, picture = (
        _tabulate(layout, sharded_dims, is_complete=is_complete),
        _draw_slices(layout, sharded_dims),
    )
    yield table if picture is None else _Fitting(picture, table)


@final
class _Fitting:
    """A drawing if it fits the width, else a table."""

    def __init__(self, picture: Table, table: RenderableType) -> None:
        self._picture = picture
        self._table = table

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        wanted = Measurement.get(console, options.update(width=1000), self._picture).maximum
        yield self._picture if wanted <= options.max_width else self._table


def _is_sharded(layout: TensorLayout, dim: int) -> bool:
    return len({shard.stretches[dim] for shard in layout.slices}) > 1


def _draw_slices(layout: TensorLayout, sharded_dims: list[int]) -> Table | None:
    """Draw slices: rows are the first sharded dim, columns the second."""
    if len(sharded_dims) != 2:
        return None
    rows, columns = _stretches(layout, sharded_dims[0]), _stretches(layout, sharded_dims[1])
    if len(rows) > _MAX_SIDE or len(columns) > _MAX_SIDE:
        return None
    holders = {
        (_format(shard, sharded_dims[0]), _format(shard, sharded_dims[1])): format_ranks(
            shard.ranks
        )
        for shard in layout.slices
    }
    table = Table(box=box.SQUARE, show_lines=True, header_style="dim")
    table.add_column(Text(f"dim {sharded_dims[0]}"))
    for column in columns:
        table.add_column(Text(f"dim {sharded_dims[1]}: {column}"), justify="center")
    for row in rows:
        table.add_row(Text(row, "dim"), *(Text(holders.get((row, c), ""), "bold") for c in columns))
    return table


def _stretches(layout: TensorLayout, dim: int) -> list[str]:
    """List the distinct index ranges along a dim in order; empty ranges come last."""
    spans = {shard.stretches[dim] for shard in layout.slices}
    ordered = sorted(spans, key=lambda span: (span == ((0, 0),), span))
    return [_format_stretches(span) for span in ordered]


def _format(shard: Slice, dim: int) -> str:
    return _format_stretches(shard.stretches[dim])


def _format_stretches(stretches: tuple[tuple[int, int], ...]) -> str:
    if stretches == ((0, 0),):
        return "nothing"
    return ", ".join(f"{start}:{stop}" for start, stop in stretches)


def _tabulate(
    layout: TensorLayout, sharded_dims: list[int], *, is_complete: bool
) -> RenderableType:
    columns = {"ranks": Column("ranks", ColumnStyle.NAME, 8)}
    columns |= {f"dim {dim}": Column(f"dim {dim}") for dim in range(len(layout.shape))}
    columns |= {"held": Column("elements")}
    shown = layout.slices if is_complete else layout.slices[:_MAX_ROWS]
    num_hidden = len(layout.slices) - len(shown)
    note = f"… {plural(num_hidden, 'more slice')}" if num_hidden else ""
    is_partial = any(placement.startswith("Partial") for placement in layout.placements)
    if not sharded_dims and 0 not in layout.shape:
        content = "a partial sum" if is_partial else "all of it"
        note = f"every rank of the mesh holds {content}"
    return Grid(columns, [_make_row(shard) for shard in shown], [list(columns)], note=note)


def _make_row(shard: Slice) -> Row:
    row: dict[str, Text | str] = {"ranks": make_text(format_ranks(shard.ranks), width=60)}
    num_elements = 1
    for dim, stretches in enumerate(shard.stretches):
        row[f"dim {dim}"] = _format_stretches(stretches)
        num_elements *= sum(stop - start for start, stop in stretches)
    return row | {"held": f"{num_elements:,}"}
