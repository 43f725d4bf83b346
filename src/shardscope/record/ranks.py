"""Sets of ranks as arithmetic spans, so that a group of 16,384 ranks is one small record."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Annotated

from msgspec import Meta, Struct

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
        """The same ranks as a range, in which membership is fast to test."""
        return range(self.first, self.first + self.count * self.step, self.step)


def compress_ranks(ranks: Iterable[int]) -> tuple[RankSpan, ...]:
    """Fold ranks, in the given order, into spans by a single greedy pass.

    Args:
        ranks: The ranks.

    Examples:
        >>> compress_ranks([0, 8, 16])
        (RankSpan(first=0, count=3, step=8),)
    """
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
    """List all ranks of spans, in order.

    Args:
        spans: Rank spans.

    Examples:
        >>> expand_ranks(compress_ranks([0, 8, 16]))
        (0, 8, 16)
    """
    return tuple(rank for span in spans for rank in span)


def count_ranks(spans: Iterable[RankSpan]) -> int:
    """Count the ranks of spans.

    Args:
        spans: Rank spans.

    Examples:
        >>> count_ranks(compress_ranks([0, 8, 16]))
        3
    """
    return sum(span.count for span in spans)


def intersect_ranks(spans: tuple[RankSpan, ...], others: tuple[RankSpan, ...]) -> tuple[int, ...]:
    """List the ranks that are in both, in the order of the smaller set.

    Args:
        spans: Rank spans.
        others: Rank spans.

    Examples:
        >>> intersect_ranks(compress_ranks([0, 1, 2]), compress_ranks([2, 3]))
        (2,)
    """
    if count_ranks(others) < count_ranks(spans):
        spans, others = others, spans
    ranges = [span.as_range() for span in others]
    return tuple(rank for span in spans for rank in span if any(rank in ranks for ranks in ranges))


def rank_at(spans: Iterable[RankSpan], position: int) -> int:
    """The rank at a position among all ranks of spans.

    Args:
        spans: Rank spans.
        position: The position, from 0.

    Examples:
        >>> rank_at(compress_ranks([0, 8, 16]), 2)
        16
    """
    for span in spans:
        if position < span.count:
            return span.first + position * span.step
        position -= span.count
    raise IndexError(f"there is no rank at position {position} past the last")


def format_ranks(spans: Iterable[RankSpan]) -> str:
    """Format spans for people: `0-7`, `0-1016/8` (every eighth), `3`, joined by commas.

    Args:
        spans: Rank spans.

    Examples:
        >>> format_ranks(compress_ranks([0, 8, 16]))
        '0-16/8'
    """
    return ",".join(_format_span(span) for span in spans)


def list_ranks(ranks: Iterable[int]) -> str:
    """Format ranks for a sentence, sorted: `0-2,5`, and `1,5` where a span would be `1-5/4`.

    Args:
        ranks: The ranks.

    Examples:
        >>> list_ranks([5, 0, 1, 2])
        '0-2,5'
    """
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
