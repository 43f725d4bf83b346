"""Sets of identical ranks, and bytes sent from rank to rank."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import NamedTuple

from msgspec import Struct

from shardscope.record import (
    Collective,
    CollectiveKind,
    Phase,
    RankSpan,
    Recording,
    compress_ranks,
    count_ranks,
    expand_ranks,
    rank_at,
)
from shardscope.record.traffic import count_traffic, find_busiest, sum_traffic
from shardscope.record.units import plural


class Facet(Struct, frozen=True, order=True):
    """What collectives are grouped by."""

    phase: Phase
    kind: CollectiveKind
    axis: str


class IdenticalRanks(Struct, frozen=True):
    """Ranks that issued the same collectives, with the collectives of one of them."""

    ranks: tuple[RankSpan, ...]
    calls: tuple[Collective, ...]


def find_busiest_ranks(rank_sets: Sequence[IdenticalRanks]) -> int:
    """Return the position of the identical ranks that send most."""
    return find_busiest([sum_traffic(map(count_traffic, ranks.calls)) for ranks in rank_sets])


def fold_ranks(recording: Recording) -> tuple[IdenticalRanks, ...]:
    """Group ranks that issued the same collectives."""
    calls: dict[int, list[Collective]] = {rank: [] for rank in expand_ranks(recording.run.ranks)}
    for call in recording.collectives:
        calls.setdefault(call.rank, []).append(call)
    rank_lists: dict[frozenset[tuple[object, int]], list[int]] = defaultdict(list)
    for rank in sorted(calls):
        rank_lists[frozenset(Counter(map(_profile, calls[rank])).items())].append(rank)
    return tuple(
        IdenticalRanks(compress_ranks(ranks), tuple(calls[ranks[0]]))
        for ranks in rank_lists.values()
    )


# Ranks are identical if their collectives have the same values of these fields, in any order.
PROFILE_FIELDS = (
    "owner",
    "phase",
    "kind",
    "axis",
    "cause",
    "num_ranks",
    "input_bytes",
    "output_bytes",
    "wire_bytes",
)
_profile = attrgetter(*PROFILE_FIELDS)


_MAX = 1 << 20  # receivers that are listed, counted once per route
SINGLE_RECEIVER = (CollectiveKind.SEND, CollectiveKind.GATHER)
_ALL_RECEIVERS = (CollectiveKind.ALL_TO_ALL, CollectiveKind.SCATTER)

# Sender and receiver.
RankPair = tuple[int, int]
# Sending rank, group, kind, and the receiving rank if the call names one.
Route = tuple[int, str, CollectiveKind, int | None]


class SendMatrix(NamedTuple):
    """Bytes sent from rank to rank; senders are recorded ranks."""

    sent: dict[RankPair, int]
    num_unknown: int  # calls left out because their destination was not recorded


class TrafficSummary(Struct, frozen=True, kw_only=True):
    """What the views of a page need to know of all collectives of a recording.

    `report/serve/large_run.py` computes it of files whose collectives are not made records; then a
    note says what `rank_sets` leave out.
    """

    rank_sets: tuple[IdenticalRanks, ...]
    num_calls: int
    num_senders: int  # ranks that issued a collective
    route_bytes: Mapping[Route, int]
    route_calls: Mapping[Route, int]
    note: str = ""


def summarize_traffic(recording: Recording) -> TrafficSummary:
    """Summarize the collectives of a recording."""
    num_bytes, num_calls = _sum_routes(recording.collectives)
    return TrafficSummary(
        rank_sets=fold_ranks(recording),
        num_calls=len(recording.collectives),
        num_senders=len({call.rank for call in recording.collectives}),
        route_bytes=num_bytes,
        route_calls=num_calls,
    )


def sum_sent_bytes(
    recording: Recording, summary: TrafficSummary | None = None
) -> SendMatrix | None:
    """Sum bytes by sender and receiver; a rank's bytes add up to the wire bytes of its calls.

    Broadcast and reduce are counted as rings, like their wire bytes. None if there are too many
    pairs to show.
    """
    groups = {group.name: group.ranks for group in recording.groups}
    summary = summary or summarize_traffic(recording)
    sent: Counter[RankPair] = Counter()
    num_unknown, num_listed = 0, 0
    for route, total in summary.route_bytes.items():
        ranks = groups.get(route[1], ())
        num_listed += count_ranks(ranks) if route[2] in _ALL_RECEIVERS else 1
        if num_listed > _MAX:
            return None
        receivers = find_receivers(route, ranks)
        num_unknown += 0 if receivers else summary.route_calls[route]
        for receiver, share in zip(receivers, share_bytes(total, len(receivers)), strict=True):
            sent[route[0], receiver] += share
    return SendMatrix(dict(sent), num_unknown)


def describe_unknown(num_calls: int) -> str:
    """Describe the calls that are left out."""
    return f"{plural(num_calls, 'call')} left out: their destination was not recorded"


def _sum_routes(calls: Iterable[Collective]) -> tuple[Counter[Route], Counter[Route]]:
    """Sum bytes and calls by route, since a step may use a route thousands of times."""
    num_bytes: Counter[Route] = Counter()
    num_calls: Counter[Route] = Counter()
    for call in calls:
        if call.wire_bytes:
            route = find_route(call)
            num_bytes[route] += call.wire_bytes
            num_calls[route] += 1
    return num_bytes, num_calls


def find_route(call: Collective) -> Route:
    """Return the route of a collective."""
    peer = call.peer if call.kind in SINGLE_RECEIVER else None
    return (call.rank, call.group, call.kind, peer)


def find_receivers(route: Route, ranks: tuple[RankSpan, ...]) -> list[int]:
    """List the ranks that the route's rank sends to, given the ranks of its group."""
    rank, _, kind, peer = route
    at = _find_position(rank, ranks)
    if kind in SINGLE_RECEIVER:
        receivers = [] if peer is None else [peer]
    elif at is None or kind is CollectiveKind.RECV:
        receivers = []
    elif kind in _ALL_RECEIVERS:
        receivers = list(expand_ranks(ranks))
    else:
        receivers = [rank_at(ranks, (at + 1) % count_ranks(ranks))]
    return [receiver for receiver in receivers if receiver != rank]


def _find_position(rank: int, ranks: Iterable[RankSpan]) -> int | None:
    """Return a rank's position in the spans, without expanding them."""
    before = 0
    for span in ranks:
        steps, rest = divmod(rank - span.first, span.step)
        if rest == 0 and 0 <= steps < span.count:
            return before + steps
        before += span.count
    return None


def share_bytes(num_bytes: int, num_parts: int) -> Iterator[int]:
    """Divide into equal parts; the first parts get one byte more if there is a remainder."""
    part, rest = divmod(num_bytes, max(1, num_parts))
    return (part + (index < rest) for index in range(num_parts))


class Spread(NamedTuple):
    """Minimum and maximum of a value over ranks."""

    low: int
    high: int


def spread(values: Iterable[int]) -> Spread:
    """Return the spread over ranks with nonzero values: pipeline stages lack values of others."""
    present = [value for value in values if value] or [0]
    return Spread(min(present), max(present))


def sum_known(values: Iterable[int | None]) -> int | None:
    """Sum values; None if any is None or if there are none."""
    known = list(values)
    if not known or None in known:
        return None
    return sum(value for value in known if value is not None)


def format_spread(values: Spread, form: Callable[[int], str]) -> str:
    """Format the value if ranks agree, else `≤` and the maximum."""
    return form(values.high) if values.low == values.high else f"≤ {form(values.high)}"
