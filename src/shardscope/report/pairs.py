"""Who sends to whom: bytes from rank to rank, as groups that run rings send them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from shardscope.record import (
    Collective,
    CollectiveKind,
    RankSpan,
    Recording,
    count_ranks,
    expand_ranks,
    rank_at,
)
from shardscope.report.layout import plural

__all__ = ["Pair", "Pairs", "describe_unknown", "sum_pairs"]

_MAX = 1 << 20  # receivers that are listed, again for each route that leads to them
_ONE_RECEIVER = (CollectiveKind.SEND, CollectiveKind.GATHER)
_SHARED_OUT = (CollectiveKind.ALL_TO_ALL, CollectiveKind.SCATTER)

# From whom to whom.
Pair = tuple[int, int]
# A rank, its group, what it does there, and the rank that it sends to where its call names one.
_Route = tuple[int, str, CollectiveKind, int | None]


class Pairs(NamedTuple):
    """What went from rank to rank; senders are ranks that were recorded."""

    sent: dict[Pair, int]
    num_unknown: int  # calls that are left out: their destination was not recorded


def sum_pairs(recording: Recording) -> Pairs | None:
    """Bytes by sender and receiver; each rank's add up to what its calls put on the wire.

    A broadcast or a reduce passes through the ring, as the count of its bytes has it. None where
    there are so many pairs that nobody could look at them.
    """
    groups = {group.name: group.ranks for group in recording.groups}
    num_bytes, num_calls = _sum_routes(recording.collectives)
    sent: Counter[Pair] = Counter()
    num_unknown, num_listed = 0, 0
    for route, total in num_bytes.items():
        ranks = groups.get(route[1], ())
        num_listed += count_ranks(ranks) if route[2] in _SHARED_OUT else 1
        if num_listed > _MAX:
            return None
        receivers = _find_receivers(route, ranks)
        num_unknown += 0 if receivers else num_calls[route]
        for receiver, share in zip(receivers, _share(total, len(receivers)), strict=True):
            sent[route[0], receiver] += share
    return Pairs(dict(sent), num_unknown)


def describe_unknown(num_calls: int) -> str:
    """What is left out."""
    return f"{plural(num_calls, 'call')} left out: their destination was not recorded"


def _sum_routes(calls: Iterable[Collective]) -> tuple[Counter[_Route], Counter[_Route]]:
    """Bytes and calls by route: a step may take the same one thousands of times."""
    num_bytes: Counter[_Route] = Counter()
    num_calls: Counter[_Route] = Counter()
    for call in calls:
        if call.wire_bytes:
            peer = call.peer if call.kind in _ONE_RECEIVER else None
            route = (call.rank, call.group, call.kind, peer)
            num_bytes[route] += call.wire_bytes
            num_calls[route] += 1
    return num_bytes, num_calls


def _find_receivers(route: _Route, ranks: tuple[RankSpan, ...]) -> list[int]:
    """Those that its rank, which is one of those of its group, sends to."""
    rank, _, kind, peer = route
    at = _find_position(rank, ranks)
    if kind in _ONE_RECEIVER:
        found = [] if peer is None else [peer]
    elif at is None or kind is CollectiveKind.RECV:
        found = []
    elif kind in _SHARED_OUT:
        found = list(expand_ranks(ranks))
    else:
        found = [rank_at(ranks, (at + 1) % count_ranks(ranks))]
    return [receiver for receiver in found if receiver != rank]


def _find_position(rank: int, ranks: Iterable[RankSpan]) -> int | None:
    """A rank's position among all those of the spans, which are too many to list for each call."""
    before = 0
    for span in ranks:
        steps, rest = divmod(rank - span.first, span.step)
        if rest == 0 and 0 <= steps < span.count:
            return before + steps
        before += span.count
    return None


def _share(num_bytes: int, num_parts: int) -> Iterator[int]:
    """Equal parts but for what is left over, which goes to the first ones byte by byte."""
    part, rest = divmod(num_bytes, max(1, num_parts))
    return (part + (index < rest) for index in range(num_parts))
