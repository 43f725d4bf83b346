"""Where each rank stood when the recordings of a run stop early, group by group."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from rich.console import RenderableType

from shardscope.record import (
    Collective,
    Recording,
    Stop,
    count_ranks,
    list_ranks,
)
from shardscope.record.recording import list_calls_by_group
from shardscope.report.grid import Column, Grid, Look, Row, leave_out
from shardscope.report.layout import make_text, make_title
from shardscope.report.units import format_bytes

__all__ = ["render_stops"]

_MAX_ROWS = 30
_COLUMNS = {
    "group": Column("group", Look.NAME, 8),
    "ranks": Column("ranks", Look.NAME, 5),
    "issued": Column("issued"),
    "last": Column("last collective", Look.NAME, 10),
    "line": Column("line", Look.NAME, 14),
    "then": Column("then", Look.NAME, 8),
}

# How many calls, the last of them, its line, and how the rank stopped.
_Place = tuple[int, str, str, str]


def render_stops(recording: Recording) -> Iterator[RenderableType]:
    """A table of positions, if a rank was killed, or raised while others went on."""
    is_alone = count_ranks(recording.run.ranks) < 2
    if all(is_alone and stop.error is not None for stop in recording.stops):
        return
    places = _find_places(recording)
    # Groups in which ranks differ come first: there somebody waits.
    names = sorted(places, key=lambda name: len({place[0] for place in places[name]}) < 2)
    rows: list[Row] = []
    for name in names:
        for place, ranks in sorted(places[name].items(), reverse=True):
            num_calls, last, line, then = place
            rows.append(
                {
                    "group": make_text(name),
                    "ranks": make_text(list_ranks(ranks)),
                    "issued": f"{num_calls:,}",
                    "last": make_text(last),
                    "line": make_text(line),
                    "then": make_text(then),
                }
            )
    if not rows:
        return
    yield make_title("Where the ranks stopped", "calls issued in each group, and the last of them")
    num_hidden = len(rows) - _MAX_ROWS
    yield Grid(
        _COLUMNS,
        rows[:_MAX_ROWS],
        leave_out(list(_COLUMNS), "last", "then"),
        note=f"… {num_hidden:,} more rows" if num_hidden > 0 else "",
    )


def _find_places(recording: Recording) -> dict[str, dict[_Place, list[int]]]:
    """Of each group that was used, who stood where."""
    stops = {stop.rank: stop for stop in recording.stops}
    places: dict[str, dict[_Place, list[int]]] = {}
    for name, by_rank in list_calls_by_group(recording).items():
        found: dict[_Place, list[int]] = defaultdict(list)
        for rank, mine in by_rank.items():
            found[(*_describe_last(mine), _describe_stop(stops.get(rank)))].append(rank)
        places[name] = found
    return places


def _describe_last(calls: list[Collective]) -> tuple[int, str, str]:
    if not calls:
        return 0, "", ""
    last = max(calls, key=lambda call: call.order)
    words = [str(last.kind), format_bytes(max(last.input_bytes, last.output_bytes))]
    if last.peer is not None:
        words.append(f"peer {last.peer}")
    line = "" if last.source is None else f"{last.source.file}:{last.source.line}"
    return len(calls), " ".join(words), line


def _describe_stop(stop: Stop | None) -> str:
    if stop is None:
        return "left the trace"
    if not stop.is_gapless:
        return "records lost"
    if stop.error is not None:
        return f"raised {stop.error.partition(':')[0]}"
    phases = [begin.name for begin in stop.open_spans if not begin.thread]
    return f"stopped in {' > '.join(phases)}" if phases else "stopped"
