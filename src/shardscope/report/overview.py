"""What was found out, in figures: a line for each."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import RenderableType

from shardscope.record import Recording
from shardscope.report.figures import list_figures
from shardscope.report.grid import Column, Grid, Look, Row, leave_out
from shardscope.report.layout import make_text, make_title
from shardscope.report.traffic import RankClass

__all__ = ["render_figures"]

_COLUMNS = {
    "view": Column("view", Look.NAME, 13),
    "figure": Column("figure", Look.PROSE, 20),
}


def render_figures(
    recording: Recording, classes: tuple[RankClass, ...]
) -> Iterator[RenderableType]:
    """A row for each figure; nothing if there is none."""
    figures = list_figures(recording, classes)
    if not figures:
        return
    yield make_title("Figures", "--view NAME shows more")
    rows: list[Row] = [{"view": one.view, "figure": make_text(one.words)} for one in figures]
    yield Grid(_COLUMNS, rows, leave_out(list(_COLUMNS)))
