"""Sums by kind, mesh axis and phase."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from rich.console import RenderableType

from shardscope.record import Phase, Recording, count_ranks
from shardscope.report.fold import Traffic
from shardscope.report.grid import Cell, Column, Grid, Look, Row, leave_out
from shardscope.report.heading import describe_passes
from shardscope.report.layout import format_bar, format_share, make_text, plural
from shardscope.report.traffic import Facet, RankClass, Tally, add_up
from shardscope.report.units import format_bytes, format_count

__all__ = ["describe_totals", "render_totals"]

_MAX_ROWS = 60
_PHASES = [str(phase) for phase in Phase]
_FIGURES = {
    "count": Column("count"),
    "input": Column("input"),
    "output": Column("output"),
    "sent": Column("sent"),
    "share": Column("share"),
    "bar": Column("", Look.NAME, 8),
}
_MIN_WIDTHS = {"kind": 14, "axis": 8, "phase": 9}  # kinds and phases whole

# The facets that name a row, and what was said.
Sums = list[tuple[tuple[str, ...], Tally]]


def describe_totals(recording: Recording, classes: tuple[RankClass, ...]) -> str:
    """Whose figures these are: one rank's where all are alike, else those of all together."""
    # The busiest rank of each row would be another rank each time, and the rows never a sum.
    num_ranks = sum(count_ranks(one.ranks) for one in classes)
    whose = "per rank" if len(classes) == 1 else f"{plural(num_ranks, 'rank')} together"
    return ", ".join(filter(None, [whose, describe_passes(recording)]))


def render_totals(
    totals: Traffic, classes: tuple[RankClass, ...], facets: Sequence[str]
) -> RenderableType:
    """A row for each combination of the facets (`kind`, `axis`, `phase`) that occurs."""
    sums = _sum_by(totals, classes, facets)
    shown = _keep_costliest(sums)
    whole = add_up(one for _, one in sums)
    rows = _make_rows(shown, whole, facets)
    if len(sums) > 1:
        rows.append({facets[0]: "total", **_format_tally(whole)})
    num_hidden = len(sums) - len(shown)
    note = f"… {num_hidden:,} more, which cost less: see shardscope export --to csv"
    columns = {name: Column(name, Look.NAME, _MIN_WIDTHS[name]) for name in facets} | _FIGURES
    layouts = leave_out(list(columns), "bar", "share", "output", "input", "count")
    return Grid(columns, rows, layouts, note=note if num_hidden else "")


def _sum_by(totals: Traffic, classes: tuple[RankClass, ...], facets: Sequence[str]) -> Sums:
    sums: dict[tuple[str, ...], Tally] = defaultdict(Tally)
    for one, traffic in zip(classes, totals, strict=True):
        times = count_ranks(one.ranks) if len(classes) > 1 else 1
        for facet, tally in traffic.items():
            sums[_read(facet, facets)] += tally * times
    return sorted(sums.items(), key=lambda item: [_sort_key(name) for name in item[0]])


def _read(facet: Facet, names: Sequence[str]) -> tuple[str, ...]:
    return tuple(str(getattr(facet, name)) for name in names)


def _sort_key(name: str) -> tuple[int, str]:
    # Phases in the order they happen, all else by the alphabet.
    return (_PHASES.index(name), "") if name in _PHASES else (-1, name)


def _keep_costliest(sums: Sums) -> Sums:
    if len(sums) <= _MAX_ROWS:
        return sums
    least = sorted(one.wire_bytes for _, one in sums)[-_MAX_ROWS]
    return [item for item in sums if item[1].wire_bytes >= least][:_MAX_ROWS]


def _make_rows(sums: Sums, whole: Tally, facets: Sequence[str]) -> list[Row]:
    rows: list[Row] = []
    previous: tuple[str, ...] = ()
    for names, one in sums:
        row: dict[str, Cell] = {
            name: make_text(text)
            for index, (name, text) in enumerate(zip(facets, names, strict=True))
            if names[: index + 1] != previous[: index + 1]
        }
        row |= _format_tally(one)
        row["share"] = format_share(one.wire_bytes, whole.wire_bytes)
        row["bar"] = format_bar(one.wire_bytes, whole.wire_bytes)
        rows.append(row)
        previous = names
    return rows


def _format_tally(one: Tally) -> dict[str, Cell]:
    return {
        "count": format_count(one.count),
        "input": format_bytes(one.input_bytes),
        "output": format_bytes(one.output_bytes),
        "sent": format_bytes(one.wire_bytes),
    }
