"""Why it was said: collectives by what asked for them, each with a line of the program."""

from __future__ import annotations

from collections import defaultdict

from msgspec import Struct
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from shardscope.record import Collective, Recording, describe_cause
from shardscope.report.grid import Column, Grid, Look, Row
from shardscope.report.layout import make_text
from shardscope.report.lines import format_source
from shardscope.report.traffic import RankClass, Tally, name_axis, tally
from shardscope.report.units import format_bytes, format_count, format_spread, spread

__all__ = ["describe_cause", "render_causes"]

_MAX_LINES = 4  # of a cause
_INDENT = 2
_COLUMNS = {
    "what": Column("what", Look.NAME, 14),
    "what and cause": Column("what and cause", Look.PROSE, 20),
    "count": Column("count"),
    "on wire": Column("on wire"),
    "cause": Column("cause", Look.PROSE, 32),
}
# Where there is no room for the cause beside the figures it goes below what it led to.
_LAYOUTS = [
    ["what", "count", "on wire", "cause"],
    ["what and cause", "count", "on wire"],
    ["what and cause", "on wire"],
]


class _Reason(Struct, frozen=True):
    """A cause and what it led to."""

    words: str
    what: str


def render_causes(
    recording: Recording, classes: tuple[RankClass, ...], *, limit: int | None = None
) -> RenderableType:
    """A row for each cause and collective, the costliest first; `limit` keeps the first few."""
    sums: dict[_Reason, list[Tally]] = defaultdict(lambda: [Tally()] * len(classes))
    examples: dict[_Reason, Collective] = {}
    for index, one in enumerate(classes):
        for call in one.calls:
            axis = name_axis(call, recording.run.world_size)
            reason = _Reason(describe_cause(call.cause), f"{call.kind}[{axis}]")
            sums[reason][index] += tally(call)
            if call.source is not None:
                examples.setdefault(reason, call)
    ranked = sorted(sums.items(), key=lambda item: (-_sent(item[1]), item[0].words, item[0].what))
    rows = [_make_row(reason, tallies, examples.get(reason)) for reason, tallies in ranked[:limit]]
    num_hidden = len(ranked) - len(rows)
    note = f"… {num_hidden:,} more: --by cause shows all" if num_hidden else ""
    return Grid(_COLUMNS, rows, _LAYOUTS, note=note)


def _sent(tallies: list[Tally]) -> int:
    return max((one.wire_bytes for one in tallies), default=0)


def _make_row(reason: _Reason, tallies: list[Tally], example: Collective | None) -> Row:
    return {
        "what": make_text(reason.what),
        "count": format_spread(spread(one.count for one in tallies), format_count),
        "on wire": format_spread(spread(one.wire_bytes for one in tallies), format_bytes),
        "cause": lambda width: _format_reason(reason, example, width),
        "what and cause": lambda width: Group(
            make_text(reason.what, width=width),
            Padding(_format_reason(reason, example, width - _INDENT), (0, 0, 0, _INDENT)),
        ),
    }


def _format_reason(reason: _Reason, example: Collective | None, width: int) -> Text:
    text = make_text(reason.words, width=_MAX_LINES * width)
    if example is not None and example.source is not None:
        text.append("\n").append_text(format_source(example.source, width=width))
    return text
