"""Which ranks said the same, where not all did."""

from __future__ import annotations

from rich.console import RenderableType

from shardscope.record import format_ranks
from shardscope.report.grid import Column, Grid, Look, Row, leave_out
from shardscope.report.layout import make_text
from shardscope.report.traffic import RankClass, add_up, tally
from shardscope.report.units import format_bytes, format_count

__all__ = ["render_ranks"]

_MAX_SHOWN = 8
_COLUMNS = {
    "ranks": Column("ranks", Look.NAME, 16),
    "count": Column("count"),
    "input": Column("input"),
    "output": Column("output"),
    "sent": Column("sent"),
}


def render_ranks(classes: tuple[RankClass, ...]) -> RenderableType:
    """A row for each class of ranks, the busiest first."""
    sums = [(one, add_up(tally(call) for call in one.calls)) for one in classes]
    sums.sort(key=lambda item: (-item[1].wire_bytes, item[0].ranks[0].first))
    rows: list[Row] = [
        {
            "ranks": make_text(format_ranks(one.ranks)),
            "count": format_count(total.count),
            "input": format_bytes(total.input_bytes),
            "output": format_bytes(total.output_bytes),
            "sent": format_bytes(total.wire_bytes),
        }
        for one, total in sums[:_MAX_SHOWN]
    ]
    num_hidden = len(sums) - _MAX_SHOWN
    layouts = leave_out(list(_COLUMNS), "output", "input", "count")
    return Grid(_COLUMNS, rows, layouts, note=f"… {num_hidden:,} more" if num_hidden > 0 else "")
