"""Sets of ranks as a few arithmetic spans, so that a group of 16,384 ranks is one small record."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Annotated

from msgspec import Meta, Struct

__all__ = [
    "MAX_RANKS",
    "Natural",
    "NumRanks",
    "Rank",
    "RankSpan",
    "compress_ranks",
    "count_ranks",
    "expand_ranks",
    "format_ranks",
    "intersect_ranks",
    "list_ranks",
    "rank_at",
]

# Bounds hold when a file is read, so that a hostile one cannot name 10**18 ranks.
MAX_RANKS = 2**20
Natural = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Rank = Annotated[int, Meta(ge=0, lt=MAX_RANKS)]
NumRanks = Annotated[int, Meta(ge=1, le=MAX_RANKS)]


class RankSpan(Struct, frozen=True, array_like=True, gc=False):
    """`count` ranks: first, first + step, first + 2·step, …"""

    first: Rank
    count: NumRanks = 1
    step: NumRanks = 1

    def __iter__(self) -> Iterator[int]:
        return iter(self.as_range())

    def as_range(self) -> range:
        """The same ranks; whether one is among them costs nothing to ask."""
        return range(self.first, self.first + self.count * self.step, self.step)


def compress_ranks(ranks: Iterable[int]) -> tuple[RankSpan, ...]:
    """Fold ranks, in the order given, into as few spans as a single greedy pass finds."""
    spans: list[RankSpan] = []
    pending: list[int] = []
    for rank in ranks:
        if len(pending) >= 2 and rank - pending[-1] != pending[1] - pending[0]:
            is_loose = len(pending) == 2 and rank - pending[-1] == 1
            spans.append(RankSpan(pending[0]) if is_loose else _span(pending))
            pending = pending[1:] if is_loose else []  # 0,2-3 rather than 0-2/2,3
        elif len(pending) == 1 and rank <= pending[0]:
            spans.append(RankSpan(pending[0]))
            pending = []
        pending.append(rank)
    if len(pending) == 2 and pending[1] - pending[0] != 1 and spans:
        spans.extend(RankSpan(rank) for rank in pending)
    elif pending:
        spans.append(_span(pending))
    return tuple(spans)


def _span(ranks: list[int]) -> RankSpan:
    step = ranks[1] - ranks[0] if len(ranks) > 1 else 1
    return RankSpan(ranks[0], len(ranks), step)


def expand_ranks(spans: Iterable[RankSpan]) -> tuple[int, ...]:
    """All ranks of the spans, in order."""
    return tuple(rank for span in spans for rank in span)


def count_ranks(spans: Iterable[RankSpan]) -> int:
    """How many ranks the spans hold."""
    return sum(span.count for span in spans)


def intersect_ranks(spans: tuple[RankSpan, ...], others: tuple[RankSpan, ...]) -> tuple[int, ...]:
    """Ranks that are in both, in the order of the smaller set, which alone is written out."""
    if count_ranks(others) < count_ranks(spans):
        spans, others = others, spans
    ranges = [span.as_range() for span in others]
    return tuple(rank for span in spans for rank in span if any(rank in one for one in ranges))


def rank_at(spans: Iterable[RankSpan], position: int) -> int:
    """The rank at a position among all those of the spans."""
    for span in spans:
        if position < span.count:
            return span.first + position * span.step
        position -= span.count
    raise IndexError(f"there is no rank at position {position} past the last")


def format_ranks(spans: Iterable[RankSpan]) -> str:
    """`0-7`, `0-1016/8` (every eighth), `3`, joined by commas."""
    return ",".join(_format_span(span) for span in spans)


def list_ranks(ranks: Iterable[int]) -> str:
    """Ranks in a sentence, sorted: `0-2,5`, `1,5` where a span would be `1-5/4`."""
    return format_ranks(
        part
        for span in compress_ranks(sorted(set(ranks)))
        for part in (map(RankSpan, span) if span.count == 2 and span.step != 1 else (span,))
    )


def _format_span(span: RankSpan) -> str:
    if span.count == 1:
        return str(span.first)
    last = span.first + (span.count - 1) * span.step
    return f"{span.first}-{last}" + (f"/{span.step}" if span.step != 1 else "")
