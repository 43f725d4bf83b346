"""When collectives were issued: a strip of bars for each rank, from the first to the last."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import final

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.text import Text

from shardscope.record import Collective, Phase, Recording
from shardscope.report.align import align_clocks, has_clock
from shardscope.report.layout import draw_level, make_title
from shardscope.report.names import make_inert, shorten
from shardscope.report.traffic import name_axis
from shardscope.report.units import format_bytes, format_duration

__all__ = ["render_timeline"]

_MAX_RANKS = 16
_MAX_AXES = 8
_NUM_CELLS = 100
_MAX_LABEL = 16
_LETTERS = {
    Phase.FORWARD: "f",
    Phase.BACKWARD: "b",
    Phase.RECOMPUTE: "r",
    Phase.OPTIMIZER: "o",
    Phase.OUTSIDE: "·",
}

# When, how much, and in which phase.
Moment = tuple[int, int, Phase]


def render_timeline(recording: Recording) -> Iterator[RenderableType]:
    """A strip for each rank or, where there is only one, for each mesh axis."""
    calls: dict[int, list[Collective]] = defaultdict(list)
    for call in recording.collectives:
        calls[call.rank].append(call)
    if not calls:
        return
    times = _place(calls, is_timed=has_clock(recording))
    yield make_title("Timeline", _describe(recording, times))
    strips = _by_axis(recording, times) if len(calls) == 1 else _by_rank(calls, times)
    yield _Strips(strips, list(times.values()))
    if len(calls) > _MAX_RANKS:
        yield Text(f"… {len(calls) - _MAX_RANKS:,} more ranks: see shardscope report", "dim")


# A call's place on the common clock, by rank and order.
Times = dict[tuple[int, int], Moment]


def _place(calls: Mapping[int, Sequence[Collective]], *, is_timed: bool) -> Times:
    """On a common clock or, where the run's clock was not read, by position."""
    offsets = align_clocks(calls) if is_timed else {}
    return {
        (rank, call.order): (
            (call.start_ns or 0) + offsets[rank] if is_timed else call.order,
            call.wire_bytes,
            call.phase,
        )
        for rank, mine in calls.items()
        for call in mine
    }


def _describe(recording: Recording, times: Times) -> str:
    met = {phase for _, _, phase in times.values()}
    words = (f"{letter} {phase}" for phase, letter in _LETTERS.items() if phase in met)
    return f"bytes sent {_describe_span(recording, times)}; {', '.join(words)}"


def _describe_span(recording: Recording, times: Times) -> str:
    if not has_clock(recording):
        word = "simulated order" if recording.run.is_simulated else "order of issue"
        return f"in {word}, not time"
    starts = [start for start, _, _ in times.values()]
    if len(starts) == 1:
        return "by one collective"
    return f"over {format_duration(max(starts) - min(starts))}"


def _by_rank(calls: Mapping[int, Sequence[Collective]], times: Times) -> dict[str, list[Moment]]:
    shown = sorted(calls)[:_MAX_RANKS]
    return {f"rank {rank}": [times[rank, call.order] for call in calls[rank]] for rank in shown}


def _by_axis(recording: Recording, times: Times) -> dict[str, list[Moment]]:
    strips: dict[str, list[Moment]] = defaultdict(list)
    for call in recording.collectives:
        axis = shorten(make_inert(name_axis(call, recording.run.world_size)), _MAX_LABEL)
        strips[axis].append(times[call.rank, call.order])
    kept = sorted(strips, key=lambda axis: -sum(size for _, size, _ in strips[axis]))[:_MAX_AXES]
    return {axis: strips[axis] for axis in kept}


@final
class _Strips:
    """Lines of bars with their names and sums, and a line of phases, as wide as there is room."""

    def __init__(self, strips: Mapping[str, Sequence[Moment]], moments: Sequence[Moment]) -> None:
        self._strips = strips
        self._moments = moments
        self._first = min(start for start, _, _ in moments)
        self._span = max(start for start, _, _ in moments) - self._first + 1

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        margin = min(max(Text(name).cell_len for name in self._strips), options.max_width // 3) + 1
        num_cells = max(1, min(_NUM_CELLS, options.max_width - margin - 10))
        sums = {name: self._sum(strip, num_cells) for name, strip in self._strips.items()}
        most = max((max(cells) for cells in sums.values()), default=0)
        yield Text(" " * margin + self._name_phases(num_cells), "dim", no_wrap=True)
        for name, cells in sums.items():
            line = Text(no_wrap=True, overflow="crop").append(shorten(name, margin - 1), "dim")
            line.pad_right(margin - line.cell_len)
            bars = "".join(draw_level(cell, most) for cell in cells)
            yield line.append(bars, "cyan").append(f" {format_bytes(sum(cells))}", "dim")

    def _sum(self, strip: Sequence[Moment], num_cells: int) -> list[int]:
        cells = [0] * num_cells
        for start, size, _ in strip:
            cells[self._find_cell(start, num_cells)] += size
        return cells

    def _find_cell(self, start: int, num_cells: int) -> int:
        return (start - self._first) * num_cells // self._span

    def _name_phases(self, num_cells: int) -> str:
        """The phase of most calls in each cell; a cell without any goes on as before."""
        counts: list[dict[Phase, int]] = [defaultdict(int) for _ in range(num_cells)]
        for start, _, phase in self._moments:
            counts[self._find_cell(start, num_cells)][phase] += 1
        letters, last = "", " "
        for cell in counts:
            last = _LETTERS[max(cell, key=lambda phase: cell[phase])] if cell else last
            letters += last
        return letters
