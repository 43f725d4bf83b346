"""Who sends to whom: bytes from rank to rank as a picture of shades."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import final

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.text import Text

from shardscope.record import Recording
from shardscope.report.layout import make_title, plural
from shardscope.report.pairs import Pair, Pairs, describe_unknown, sum_pairs
from shardscope.report.units import format_bytes

__all__ = ["render_matrix"]

_MAX_SIDE = 32  # rows and columns of a picture
_CELL = 2  # cells of a terminal that one shade takes
_TOTAL = 10  # cells of a row's sum
_SHADES = " ░▒▓█"


def render_matrix(recording: Recording) -> Iterator[RenderableType]:
    """A picture under a title; nothing if nobody sends."""
    pairs = sum_pairs(recording)
    if pairs is None:
        yield make_title("From rank to rank", "too many pairs of ranks for a picture")
        return
    if pairs.sent or pairs.num_unknown:
        yield make_title("From rank to rank", "; ".join(_describe(pairs)))
    if pairs.sent:
        yield _Picture(pairs.sent)


def _describe(pairs: Pairs) -> Iterator[str]:
    if pairs.sent:
        senders = plural(len({sender for sender, _ in pairs.sent}), "recorded rank")
        yield f"what {senders} sent (ring estimate)"
    if pairs.num_unknown:
        yield describe_unknown(pairs.num_unknown)


@final
class _Picture:
    """A square of shades, as many ranks to a cell as there is room for."""

    def __init__(self, pairs: Mapping[Pair, int]) -> None:
        self._pairs = pairs
        self._ranks = sorted({rank for pair in pairs for rank in pair})

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        room = options.max_width - _TOTAL
        longest = len(f"{self._ranks[-1]}")
        # Few ranks have room for their numbers above; many share a cell, and have none.
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

    def _sum(self, bins: list[list[int]]) -> dict[Pair, int]:
        places = {rank: index for index, ranks in enumerate(bins) for rank in ranks}
        sums: dict[Pair, int] = defaultdict(int)
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
    """Whatever is sent at all can be seen."""
    return _SHADES[-(-num_bytes * (len(_SHADES) - 1) // most)] if num_bytes else "·"
