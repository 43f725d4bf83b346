"""Which ranks said the same, where not all did."""

from __future__ import annotations

from rich.console import RenderableType
from rich.text import Text

from shardscope.record import format_ranks
from shardscope.report.layout import make_table, make_text
from shardscope.report.traffic import RankClass, add_up, tally
from shardscope.report.units import format_bytes, format_count

__all__ = ["render_ranks"]

_MAX_SHOWN = 8


def render_ranks(classes: tuple[RankClass, ...]) -> RenderableType:
    """A row for each class of ranks, the busiest first."""
    sums = [(one, add_up(tally(call) for call in one.calls)) for one in classes]
    sums.sort(key=lambda item: (-item[1].wire_bytes, item[0].ranks[0].first))
    rows: list[list[Text | str]] = [
        [
            make_text(format_ranks(one.ranks), width=60),
            format_count(total.count),
            format_bytes(total.input_bytes),
            format_bytes(total.output_bytes),
            format_bytes(total.wire_bytes),
        ]
        for one, total in sums[:_MAX_SHOWN]
    ]
    if len(sums) > _MAX_SHOWN:
        rows.append([Text(f"… {len(sums) - _MAX_SHOWN:,} more", "dim")])
    return make_table(("ranks", "count", "put in", "got out", "on wire"), rows)
