"""Collectives by their cause, each with a line of the program."""

from __future__ import annotations

from typing import NamedTuple, final

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from shardscope.record import Collective, Recording, Redistribute, Source, describe_cause
from shardscope.report.grid import Column, Grid, Look, Row
from shardscope.report.layout import make_text
from shardscope.report.lines import format_source
from shardscope.report.traffic import RankClass, Tally, name_axis, tally
from shardscope.report.units import format_bytes, format_count, format_spread, spread

__all__ = ["Reason", "gather_reasons", "render_causes"]

_MAX_LINES = 4  # of a cause
_INDENT = 2
_COLUMNS = {
    "what": Column("what", Look.NAME, 14),
    "what and cause": Column("what and cause", Look.PROSE, 20, covers=("what", "cause")),
    "count": Column("count"),
    "sent": Column("sent"),
    "cause": Column("cause", Look.PROSE, 32),
}
# Where there is no room for the cause beside the figures it goes below what it led to.
_LAYOUTS = [
    ["what", "count", "sent", "cause"],
    ["what and cause", "count", "sent"],
    ["what and cause", "sent"],
]


class _Key(NamedTuple):
    words: str
    what: str


@final
class Reason:
    """A cause and what it led to, on each class of ranks."""

    def __init__(self, words: str, what: str, num_classes: int) -> None:
        self.words = words
        self.what = what
        self.tallies = [Tally()] * num_classes
        self.source: Source | None = None  # the first line that led to it
        self.is_implicit = False
        self.owners: dict[str | None, None] = {}  # in the order in which they spoke

    def add(self, call: Collective, index: int) -> None:
        """One more call, of the ranks of a class."""
        self.tallies[index] += tally(call)
        self.source = self.source or call.source
        self.is_implicit |= isinstance(call.cause, Redistribute) and call.cause.is_implicit
        self.owners[call.owner] = None

    @property
    def busiest(self) -> Tally:
        """Of the class that sent most because of it."""
        return max(self.tallies, key=lambda one: (one.wire_bytes, one.count), default=Tally())


def gather_reasons(recording: Recording, classes: tuple[RankClass, ...]) -> list[Reason]:
    """One for each cause and collective, the costliest first."""
    reasons: dict[_Key, Reason] = {}
    for index, one in enumerate(classes):
        for call in one.calls:
            axis = name_axis(call, recording.run.world_size)
            key = _Key(describe_cause(call.cause), f"{call.kind}[{axis}]")
            reason = reasons.get(key)
            if reason is None:
                reason = reasons[key] = Reason(*key, len(classes))
            reason.add(call, index)
    return sorted(reasons.values(), key=lambda one: (-one.busiest.wire_bytes, one.words, one.what))


def render_causes(
    recording: Recording, classes: tuple[RankClass, ...], *, limit: int | None = None
) -> RenderableType:
    """A row for each cause and collective, the costliest first; `limit` keeps the first few."""
    ranked = gather_reasons(recording, classes)
    rows = [_make_row(reason) for reason in ranked[:limit]]
    num_hidden = len(ranked) - len(rows)
    note = f"… {num_hidden:,} more: --by cause shows all" if num_hidden else ""
    return Grid(_COLUMNS, rows, _LAYOUTS, note=note)


def _make_row(reason: Reason) -> Row:
    return {
        "what": make_text(reason.what),
        "count": format_spread(spread(one.count for one in reason.tallies), format_count),
        "sent": format_spread(spread(one.wire_bytes for one in reason.tallies), format_bytes),
        "cause": lambda width: _format_reason(reason, width),
        "what and cause": lambda width: Group(
            make_text(reason.what, width=width),
            Padding(_format_reason(reason, width - _INDENT), (0, 0, 0, _INDENT)),
        ),
    }


def _format_reason(reason: Reason, width: int) -> Text:
    text = make_text(reason.words, width=_MAX_LINES * width)
    if reason.source is not None:
        text.append("\n").append_text(format_source(reason.source, width=width))
    return text
