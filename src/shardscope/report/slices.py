"""Which rank holds which slice of a tensor, as a picture where two dims are cut, and as a table."""

from __future__ import annotations

from collections.abc import Iterator
from typing import final

from rich import box
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from shardscope.record import Slice, TensorLayout, format_ranks
from shardscope.report.grid import Column, Grid, Look, Row
from shardscope.report.layout import make_text, make_title, plural
from shardscope.report.names import make_inert, shorten

__all__ = ["render_layout"]

_MAX_SIDE = 16  # rows and columns of a picture
_MAX_ROWS = 64


def render_layout(layout: TensorLayout, *, is_complete: bool = False) -> Iterator[RenderableType]:
    """A title, then a picture if two dims are cut into few parts, or a row for each slice."""
    placed = zip(layout.axes, layout.placements, strict=False)
    mesh = ", ".join(f"{axis.name}={axis.size}: {placement}" for axis, placement in placed)
    shape = "×".join(map(str, layout.shape)) or "a number"
    name, facts = make_inert(layout.name or "Tensor"), make_inert(f"{shape} · {mesh}")
    yield make_title(shorten(name, 120), shorten(facts, 200))
    cut = [dim for dim in range(len(layout.shape)) if _is_cut(layout, dim)]
    table, picture = _tabulate(layout, cut, is_complete=is_complete), _draw(layout, cut)
    yield table if picture is None else _Fitting(picture, table)


@final
class _Fitting:
    """A picture if there is room for all of it, and else a table."""

    def __init__(self, picture: Table, table: RenderableType) -> None:
        self._picture = picture
        self._table = table

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        wanted = Measurement.get(console, options.update(width=1000), self._picture).maximum
        yield self._picture if wanted <= options.max_width else self._table


def _is_cut(layout: TensorLayout, dim: int) -> bool:
    return len({one.stretches[dim] for one in layout.slices}) > 1


def _draw(layout: TensorLayout, cut: list[int]) -> Table | None:
    """Rows are the first dim that is cut, columns the second."""
    if len(cut) != 2:
        return None
    rows, columns = _stretches(layout, cut[0]), _stretches(layout, cut[1])
    if len(rows) > _MAX_SIDE or len(columns) > _MAX_SIDE:
        return None
    holders = {
        (_format(one, cut[0]), _format(one, cut[1])): format_ranks(one.ranks)
        for one in layout.slices
    }
    table = Table(box=box.SQUARE, show_lines=True, header_style="dim")
    table.add_column(Text(f"dim {cut[0]}"))
    for column in columns:
        table.add_column(Text(f"dim {cut[1]}: {column}"), justify="center")
    for row in rows:
        table.add_row(Text(row, "dim"), *(Text(holders.get((row, c), ""), "bold") for c in columns))
    return table


def _stretches(layout: TensorLayout, dim: int) -> list[str]:
    """The different ones, in order; those of nobody, which are empty, last."""
    found = {one.stretches[dim] for one in layout.slices}
    ordered = sorted(found, key=lambda one: (one == ((0, 0),), one))
    return [_format_stretches(one) for one in ordered]


def _format(one: Slice, dim: int) -> str:
    return _format_stretches(one.stretches[dim])


def _format_stretches(stretches: tuple[tuple[int, int], ...]) -> str:
    if stretches == ((0, 0),):
        return "nothing"
    return ", ".join(f"{start}:{stop}" for start, stop in stretches)


def _tabulate(layout: TensorLayout, cut: list[int], *, is_complete: bool) -> RenderableType:
    columns = {"ranks": Column("ranks", Look.NAME, 8)}
    columns |= {f"dim {dim}": Column(f"dim {dim}") for dim in range(len(layout.shape))}
    columns |= {"held": Column("elements")}
    shown = layout.slices if is_complete else layout.slices[:_MAX_ROWS]
    num_hidden = len(layout.slices) - len(shown)
    note = f"… {plural(num_hidden, 'more slice')}" if num_hidden else ""
    is_partial = any(placement.startswith("Partial") for placement in layout.placements)
    if not cut and 0 not in layout.shape:
        what = "a partial sum" if is_partial else "all of it"
        note = f"every rank of the mesh holds {what}"
    return Grid(columns, [_make_row(one) for one in shown], [list(columns)], note=note)


def _make_row(one: Slice) -> Row:
    row: dict[str, Text | str] = {"ranks": make_text(format_ranks(one.ranks), width=60)}
    num_held = 1
    for dim, stretches in enumerate(one.stretches):
        row[f"dim {dim}"] = _format_stretches(stretches)
        num_held *= sum(stop - start for start, stop in stretches)
    return row | {"held": f"{num_held:,}"}
