"""Bytes sent from rank to rank as a matrix of shades, and collectives over time as bars."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import final

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.text import Text

from shardscope.record import Collective, Phase, Recording
from shardscope.record.recording import name_axis
from shardscope.record.text import sanitize_text
from shardscope.record.units import format_bytes, format_duration, plural
from shardscope.report.model.clocks import align_clocks, has_clock
from shardscope.report.model.traffic_totals import (
    RankPair,
    SendMatrix,
    describe_unknown,
    sum_sent_bytes,
)
from shardscope.report.text.style import draw_level, make_title, shorten

_MAX_SIDE = 32  # rows and columns of a picture
_CELL = 2  # terminal cells per shade
_TOTAL = 10  # terminal cells of a row's sum
_SHADES = " ░▒▓█"


def render_matrix(recording: Recording) -> Iterator[RenderableType]:
    """Render the matrix under a title; nothing if no bytes were sent."""
    pairs = sum_sent_bytes(recording)
    if pairs is None:
        yield make_title("From rank to rank", "too many pairs of ranks for a picture")
        return
    if pairs.sent or pairs.num_unknown:
        yield make_title("From rank to rank", "; ".join(_describe_matrix(pairs)))
    if pairs.sent:
        yield _Picture(pairs.sent)


def _describe_matrix(pairs: SendMatrix) -> Iterator[str]:
    if pairs.sent:
        senders = plural(len({sender for sender, _ in pairs.sent}), "recorded rank")
        yield f"what {senders} sent (ring estimate)"
    if pairs.num_unknown:
        yield describe_unknown(pairs.num_unknown)


@final
class _Picture:
    """A square of shades; a cell stands for as many ranks as the width requires."""

    def __init__(self, pairs: Mapping[RankPair, int]) -> None:
        self._pairs = pairs
        self._ranks = sorted({rank for pair in pairs for rank in pair})

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        room = options.max_width - _TOTAL
        longest = len(f"{self._ranks[-1]}")
        # Column headers have rank numbers only if every rank has a column of its own.
        cell = longest + 1 if (longest + 1) * (len(self._ranks) + 1) <= room else _CELL
        margin = longest + 2 if cell > _CELL else 2 * longest + 3
        side = max(1, min(_MAX_SIDE, (room - margin) // cell))
        bins = self._share_out(side)
        sums = self._sum(bins)
        most = max(sums.values())
        yield Text(" " * margin + _name_columns(bins, cell), "dim", no_wrap=True)
        for row, ranks in enumerate(bins):
            numbers = [sums.get((row, column), 0) for column in range(len(bins))]
            if any(numbers):
                yield _draw_row(ranks, numbers, most, cell=cell, margin=margin)
        yield Text(f"{_SHADES[-1] * _CELL} {format_bytes(most)}, the most", "dim", no_wrap=True)

    def _share_out(self, side: int) -> list[list[int]]:
        size = -(-len(self._ranks) // side)
        return [self._ranks[start : start + size] for start in range(0, len(self._ranks), size)]

    def _sum(self, bins: list[list[int]]) -> dict[RankPair, int]:
        places = {rank: index for index, ranks in enumerate(bins) for rank in ranks}
        sums: dict[RankPair, int] = defaultdict(int)
        for (sender, receiver), num_bytes in self._pairs.items():
            sums[places[sender], places[receiver]] += num_bytes
        return dict(sums)


def _name_columns(bins: list[list[int]], cell: int) -> str:
    has_names = all(len(ranks) == 1 and len(f"{ranks[0]}") < cell for ranks in bins)
    return "".join(f"{ranks[0]}".ljust(cell) for ranks in bins) if has_names else "to"


def _draw_row(ranks: list[int], numbers: list[int], most: int, *, cell: int, margin: int) -> Text:
    name = f"{ranks[0]}" if len(ranks) == 1 else f"{ranks[0]}…{ranks[-1]}"
    line = Text(no_wrap=True, overflow="crop").append(name.rjust(margin - 2) + "  ", "dim")
    line.append("".join(_shade(number, most) * cell for number in numbers), "cyan")
    return line.append(f"  {format_bytes(sum(numbers))}", "dim")


def _shade(num_bytes: int, most: int) -> str:
    """Return the shade of a value; any nonzero value is visible."""
    return _SHADES[-(-num_bytes * (len(_SHADES) - 1) // most)] if num_bytes else "·"


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

# Start time, bytes and phase of a collective.
Moment = tuple[int, int, Phase]


def render_timeline(recording: Recording) -> Iterator[RenderableType]:
    """Render a row of bars for each rank or, if there is only one rank, for each mesh axis."""
    calls: dict[int, list[Collective]] = defaultdict(list)
    for call in recording.collectives:
        calls[call.rank].append(call)
    if not calls:
        return
    times = _compute_times(calls, is_timed=has_clock(recording))
    yield make_title("Timeline", _describe_timeline(recording, times))
    strips = _by_axis(recording, times) if len(calls) == 1 else _by_rank(calls, times)
    yield _Strips(strips, list(times.values()))
    if len(calls) > _MAX_RANKS:
        yield Text(f"… {len(calls) - _MAX_RANKS:,} more ranks: see shardscope report", "dim")


# Collectives on the common clock, by rank and order.
Times = dict[tuple[int, int], Moment]


def _compute_times(calls: Mapping[int, Sequence[Collective]], *, is_timed: bool) -> Times:
    """Return start times on a common clock or, if there is no measured clock, positions."""
    offsets = align_clocks(calls) if is_timed else {}
    return {
        (rank, call.order): (
            (call.start_ns or 0) + offsets[rank] if is_timed else call.order,
            call.wire_bytes,
            call.phase,
        )
        for rank, rank_calls in calls.items()
        for call in rank_calls
    }


def _describe_timeline(recording: Recording, times: Times) -> str:
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
        axis = shorten(sanitize_text(name_axis(call, recording.run.world_size)), _MAX_LABEL)
        strips[axis].append(times[call.rank, call.order])
    shown_axes = sorted(strips, key=lambda axis: -sum(size for _, size, _ in strips[axis]))[
        :_MAX_AXES
    ]
    return {axis: strips[axis] for axis in shown_axes}


@final
class _Strips:
    """Rows of bars with names and sums, and a row of phases, as wide as the terminal allows."""

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
        """Return a letter per cell: its most frequent phase, or the previous one if it is empty."""
        counts: list[dict[Phase, int]] = [defaultdict(int) for _ in range(num_cells)]
        for start, _, phase in self._moments:
            counts[self._find_cell(start, num_cells)][phase] += 1
        letters, last = "", " "
        for cell in counts:
            last = _LETTERS[max(cell, key=lambda phase: cell[phase])] if cell else last
            letters += last
        return letters
