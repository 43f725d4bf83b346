"""Who sends to whom: bytes from rank to rank, as numbers and as a picture of shades."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import final

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.text import Text

from shardscope.record import (
    Collective,
    CollectiveKind,
    Group,
    RankSpan,
    Recording,
    count_ranks,
    expand_ranks,
)
from shardscope.report.layout import make_title, plural
from shardscope.report.units import format_bytes

__all__ = ["render_matrix", "sum_pairs"]

_MAX = 1 << 20  # pairs of ranks
_MAX_SIDE = 32  # rows and columns of a picture
_CELL = 2  # cells of a terminal that one shade takes
_TOTAL = 10  # cells of a row's sum
_SHADES = " ░▒▓█"
_ROOTED = (CollectiveKind.SEND, CollectiveKind.GATHER, CollectiveKind.REDUCE)
_SHARED_OUT = (CollectiveKind.ALL_TO_ALL, CollectiveKind.SCATTER)
_SILENT = (CollectiveKind.RECV, CollectiveKind.BARRIER)

Pair = tuple[int, int]


def sum_pairs(recording: Recording) -> dict[Pair, int] | None:
    """Bytes by sender and receiver, if groups run rings and all-to-alls share out evenly.

    Senders are ranks that were recorded; a transfer to or from one rank names it itself. None where
    there are so many pairs that nobody could look at them.
    """
    groups = {group.name: group for group in recording.groups}
    pairs: dict[Pair, int] = defaultdict(int)
    for (rank, name, kind, peer), num_bytes in _sum_calls(recording.collectives).items():
        group = groups.get(name)
        if len(pairs) + (count_ranks(group.ranks) if group and kind in _SHARED_OUT else 1) > _MAX:
            return None
        receivers = _find_receivers(rank, group, kind, peer)
        for receiver in receivers:
            pairs[rank, receiver] += num_bytes // len(receivers)
    return dict(pairs)


_Route = tuple[int, str, CollectiveKind, int | None]


def _sum_calls(calls: Sequence[Collective]) -> dict[_Route, int]:
    sums: dict[_Route, int] = defaultdict(int)
    for call in calls:
        if call.wire_bytes and call.kind not in _SILENT:
            peer = call.peer if call.kind in _ROOTED else None
            sums[call.rank, call.group, call.kind, peer] += call.wire_bytes
    return sums


def _find_receivers(
    rank: int, group: Group | None, kind: CollectiveKind, peer: int | None
) -> Sequence[int]:
    if peer is not None:
        return [peer] if peer != rank else []
    if group is None:
        return []
    if kind in _SHARED_OUT:
        members = expand_ranks(group.ranks)
        return [member for member in members if member != rank] if rank in members else []
    following = _find_next(rank, group.ranks)
    return [following] if following not in (None, rank) else []


def _find_next(rank: int, spans: Sequence[RankSpan]) -> int | None:
    """The rank after one in a ring; a group may have too many ranks to list for each call."""
    for index, span in enumerate(spans):
        steps, rest = divmod(rank - span.first, span.step)
        if rest == 0 and 0 <= steps < span.count:
            is_last = steps == span.count - 1
            return spans[(index + 1) % len(spans)].first if is_last else rank + span.step
    return None


def render_matrix(recording: Recording) -> Iterator[RenderableType]:
    """A picture under a title; nothing if nobody sends."""
    pairs = sum_pairs(recording)
    if pairs is None:
        yield make_title("From rank to rank", "too many pairs of ranks for a picture")
    if not pairs:
        return
    senders = plural(len({sender for sender, _ in pairs}), "recorded rank")
    yield make_title("From rank to rank", f"what {senders} sent, if groups run rings")
    yield _Picture(pairs)


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
