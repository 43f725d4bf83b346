"""A table of the time spent in named phases."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from msgspec import Struct
from rich.console import RenderableType

from shardscope.record import SIMULATION_TIME, PhaseTotal, Recording, sum_spans
from shardscope.record.units import format_count, format_duration
from shardscope.report.model.traffic_totals import (
    Spread,
    format_spread,
    spread,
)
from shardscope.report.text.style import format_bar, make_text, make_title
from shardscope.report.text.table import Column, ColumnStyle, Grid, Row, narrower_layouts

_MAX_ROWS = 40
_HOST = "cpu"
_COLUMNS = {
    "phase": Column("phase", ColumnStyle.NAME, 16),
    "clock": Column("clock", ColumnStyle.NAME, 6),
    "calls": Column("calls"),
    "total": Column("total"),
    "self": Column("self"),
    "mean": Column("mean"),
    "max": Column("max"),
    "slowest": Column("slowest"),
    "bar": Column("", ColumnStyle.NAME, 8),
}


class PhaseLine(Struct, frozen=True):
    """One phase, measured by one clock, on every rank that has it."""

    name: str
    device: str
    totals: tuple[PhaseTotal, ...]

    @property
    def slowest(self) -> PhaseTotal:
        """Return the total of the rank that took longest."""
        return max(self.totals, key=lambda total: (total.total_ns, -total.rank))

    def over_ranks(self, field: str) -> Spread:
        """Return the minimum and maximum of a field over ranks."""
        return spread(getattr(total, field) for total in self.totals)


def render_phases(recording: Recording) -> Iterator[RenderableType]:
    """Render a row for each phase, longest first; nothing if no phase was timed."""
    lines = gather_phases(recording)
    if not lines:
        return
    num_ranks = len({total.rank for line in lines for total in line.totals})
    note = "self: less phases within it"
    if num_ranks > 1:
        note += "; ≤: ranks differ, and that of the one with most"
    if recording.run.is_simulated:
        note += f"; {SIMULATION_TIME}"
    yield make_title("Phases", note)
    longest_ns = sum(max(total.self_ns for total in line.totals) for line in lines)
    rows = [_make_row(line, longest_ns, num_ranks) for line in lines[:_MAX_ROWS]]
    num_hidden = len(lines) - _MAX_ROWS
    more = f"… {num_hidden:,} more, which took less: see shardscope export --to json"
    layout = [key for key in _COLUMNS if key != "clock" or _needs_clock(lines)]
    layouts = narrower_layouts(layout, "bar", "max", "slowest", "self", "mean", "clock", "calls")
    yield Grid(_COLUMNS, rows, layouts, note=more if num_hidden > 0 else "")


def gather_phases(recording: Recording) -> list[PhaseLine]:
    """Return a line for each phase and clock, longest first."""
    totals: dict[tuple[str, str], list[PhaseTotal]] = defaultdict(list)
    for total in sum_spans(recording.spans):
        totals[total.name, total.device].append(total)
    lines = [
        PhaseLine(name, device, tuple(line_totals))
        for (name, device), line_totals in totals.items()
    ]
    return sorted(lines, key=lambda line: (-line.slowest.total_ns, line.name, line.device))


def _needs_clock(lines: list[PhaseLine]) -> bool:
    return any(line.device != _HOST for line in lines)


def _make_row(line: PhaseLine, longest_ns: int, num_ranks: int) -> Row:
    self_ns = line.over_ranks("self_ns")
    return {
        "phase": make_text(line.name),
        "clock": make_text(line.device, width=12),
        "calls": format_spread(line.over_ranks("count"), format_count),
        "total": format_spread(line.over_ranks("total_ns"), format_duration),
        "self": format_spread(self_ns, format_duration),
        "mean": format_spread(line.over_ranks("mean_ns"), format_duration),
        "max": format_duration(line.over_ranks("max_ns").high),
        "slowest": f"rank {line.slowest.rank:,}" if num_ranks > 1 else "",
        "bar": format_bar(self_ns.high, longest_ns),
    }
