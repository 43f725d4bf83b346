"""The send matrix: bytes from rank to rank, or a sentence where a matrix would show no more."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from typing import NamedTuple

from msgspec.structs import replace

from shardscope.record import CollectiveKind, Recording, count_ranks
from shardscope.record.units import format_bytes
from shardscope.report.html.name_lists import NameLists
from shardscope.report.html.page import Matrix, MatrixParts
from shardscope.report.html.page_index import NOWHERE, Index
from shardscope.report.model.step_numbers import StepNumbers
from shardscope.report.model.traffic_totals import (
    IdenticalRanks,
    RankPair,
    Route,
    TrafficSummary,
    describe_unknown,
    find_receivers,
    find_route,
    share_bytes,
    sum_sent_bytes,
)

_MAX_SENDERS = 64
_MAX_RANKS = 256  # including receivers, which may have no records
_MAX_RECEIVERS = 4  # that are named
_TRANSFERS = (CollectiveKind.SEND, CollectiveKind.RECV)


def make_matrix(recording: Recording, summary: TrafficSummary) -> tuple[Matrix | None, str]:
    """Make the matrix of bytes between ranks, or None if there are too many, and a note on it."""
    if not recording.collectives:
        return None, ""
    if summary.num_senders > _MAX_SENDERS:
        return None, f"Not drawn: {summary.num_senders:,} ranks are too many to tell apart."
    traffic = sum_sent_bytes(recording, summary)
    if traffic is None:
        return None, "Not drawn: too many receiving ranks."
    ranks = sorted({rank for pair in traffic.sent for rank in pair})
    if len(ranks) > _MAX_RANKS:
        return None, f"Not drawn: what was sent went to {len(ranks):,} ranks."
    pairs = sorted(traffic.sent)
    matrix = Matrix(
        ranks=tuple(ranks),
        sender=tuple(bisect_left(ranks, sender) for sender, _ in pairs),
        receiver=tuple(bisect_left(ranks, receiver) for _, receiver in pairs),
        num_bytes=tuple(traffic.sent[pair] for pair in pairs),
    )
    return matrix, _describe_matrix(recording, traffic.num_unknown)


class _PartKey(NamedTuple):
    """What the bytes of a part have in common, as positions."""

    axis: int
    kind: int
    phase: int = NOWHERE
    owner: int = NOWHERE
    cause: int = NOWHERE
    source: int = NOWHERE
    dtype: int = NOWHERE
    step: int = NOWHERE


_Parts = dict[tuple[int, _PartKey], int]  # bytes by position of the pair
_MAX_PARTS = 10_000
# In this order, if there are too many parts.
_MERGES = ("step", "dtype", "source", "owner", "cause", "phase")


def split_matrix(
    matrix: Matrix,
    recording: Recording,
    summary: TrafficSummary,
    names: NameLists,
    index: Index,
    numbers: StepNumbers,
) -> Matrix:
    """Add the parts of the matrix, whose sums are its bytes."""
    positions = {
        (matrix.ranks[sender], matrix.ranks[receiver]): position
        for position, (sender, receiver) in enumerate(
            zip(matrix.sender, matrix.receiver, strict=True)
        )
    }
    if len(recording.collectives) == summary.num_calls:
        by_route, merged = _split_calls(recording, names, index, numbers), list[str]()
    else:  # of a large file, not all collectives are records
        by_route, merged = _split_routes(recording, summary, names)
    parts = _share_parts(by_route, recording, positions)
    for name in _MERGES:
        is_constant = len({getattr(key, name) for _, key in parts}) < 2
        if len(parts) > _MAX_PARTS and name not in merged and not is_constant:
            parts = _merge(parts, name)
            merged.append(name)
    if len(parts) > _MAX_PARTS:
        return matrix
    columns = dict(
        zip(_PartKey._fields, zip(*(key for _, key in parts), strict=True), strict=False)
    )
    if not numbers.word:
        columns["step"] = ()
    return replace(
        matrix,
        parts=MatrixParts(
            pair=tuple(pair for pair, _ in parts),
            **columns,
            num_bytes=tuple(parts.values()),
            merged=tuple(merged),
        ),
    )


_RouteParts = dict[Route, dict[_PartKey, int]]


def _split_calls(
    recording: Recording, names: NameLists, index: Index, numbers: StepNumbers
) -> _RouteParts:
    """Sum the collectives of each route by all that can be selected."""
    sums: _RouteParts = defaultdict(lambda: defaultdict(int))
    for call in recording.collectives:
        if call.wire_bytes:
            key = _PartKey(
                axis=names.axis(call),
                kind=names.kinds.at(call.kind),
                phase=names.phases.at(call.phase),
                owner=index.module(call.owner),
                cause=names.cause(call.cause),
                source=index.source(call.source),
                dtype=names.dtypes.at(call.dtype),
                step=numbers.find(call.rank, call.order),
            )
            sums[find_route(call)][key] += call.wire_bytes
    return sums


def _split_routes(
    recording: Recording, summary: TrafficSummary, names: NameLists
) -> tuple[_RouteParts, list[str]]:
    """The same by axis and kind, which are those of a route's group and of the route itself.

    Also returns what is not known.
    """
    used = {route[1] for route in summary.route_bytes}
    axes = {group.name: names.group_axis(group) for group in recording.groups if group.name in used}
    is_known = all(route[1] in axes for route in summary.route_bytes)
    parts = {
        route: {
            _PartKey(
                axis=axes[route[1]] if is_known else NOWHERE, kind=names.kinds.at(route[2])
            ): num_bytes
        }
        for route, num_bytes in summary.route_bytes.items()
    }
    return parts, [*_MERGES, *([] if is_known else ["axis"])]


def _share_parts(
    by_route: _RouteParts, recording: Recording, positions: dict[RankPair, int]
) -> _Parts:
    """Divide the bytes of each part among its receivers as those of its route are divided."""
    groups = {group.name: group.ranks for group in recording.groups}
    parts: _Parts = defaultdict(int)
    for route, sums in by_route.items():
        receivers = find_receivers(route, groups.get(route[1], ()))
        before, total = [0] * len(receivers), 0
        for key, num_bytes in sums.items():
            total += num_bytes
            after = list(share_bytes(total, len(receivers)))
            for receiver, first, last in zip(receivers, before, after, strict=True):
                if last > first:
                    parts[positions[route[0], receiver], key] += last - first
            before = after
    return parts


def _merge(parts: _Parts, name: str) -> _Parts:
    merged: _Parts = defaultdict(int)
    for (pair, key), num_bytes in parts.items():
        merged[pair, key._replace(**{name: NOWHERE})] += num_bytes
    return merged


def _describe_matrix(recording: Recording, num_unknown: int) -> str:
    words = "Ring estimate: each rank sends to the next in its group."
    num_known, world_size = count_ranks(recording.run.ranks), recording.run.world_size
    if num_known < world_size:
        verb = "was" if num_known == 1 else "were"
        words += f" Only {num_known:,} of {world_size:,} ranks {verb} recorded: "
        words += "other rows are empty."
    if num_unknown:
        words += f" {describe_unknown(num_unknown)}."
    return words


def summarize_matrix(
    recording: Recording, rank_sets: tuple[IdenticalRanks, ...], matrix: Matrix | None
) -> str:
    """Describe the traffic between ranks if it is the same everywhere, else return nothing.

    One recorded rank is one row of the matrix. If all ranks issued the same collectives, in groups
    along the axes of the mesh, all rows are equal but for their position.
    """
    if matrix is None or not matrix.num_bytes:
        return ""
    if count_ranks(recording.run.ranks) == 1:
        return _describe_sender(recording, matrix)
    world_size = recording.run.world_size
    is_along_mesh = all(
        (call.axis is not None or call.num_ranks == world_size) and call.kind not in _TRANSFERS
        for rank_set in rank_sets
        for call in rank_set.calls
        if call.wire_bytes
    )
    return _describe_axes(rank_sets[0]) if len(rank_sets) == 1 and is_along_mesh else ""


def _describe_sender(recording: Recording, matrix: Matrix) -> str:
    pairs = sorted(zip(matrix.num_bytes, matrix.receiver, strict=True), key=lambda pair: -pair[0])
    parts = [
        f"{format_bytes(num_bytes)} to rank {matrix.ranks[receiver]:,}"
        for num_bytes, receiver in pairs[:_MAX_RECEIVERS]
    ]
    if len(pairs) > _MAX_RECEIVERS:
        rest = sum(num_bytes for num_bytes, _ in pairs[_MAX_RECEIVERS:])
        num_more = len(pairs) - _MAX_RECEIVERS
        parts.append(f"{format_bytes(rest)} to {num_more:,} more rank{'s' * (num_more > 1)}")
    sender = matrix.ranks[matrix.sender[0]]
    return (
        f"Of {recording.run.world_size:,} ranks, rank {sender:,} was recorded: it sends "
        f"{_join(parts)} (ring estimate)."
    )


def _describe_axes(rank_set: IdenticalRanks) -> str:
    sent: Counter[str] = Counter()
    for call in rank_set.calls:
        where = "among all ranks" if call.axis is None else f"along {call.axis}"
        sent[where] += call.wire_bytes
    parts = [f"{format_bytes(size)} {where}" for where, size in sent.most_common() if size]
    return (
        f"All {count_ranks(rank_set.ranks):,} recorded ranks issued the same collectives, each "
        f"sending {_join(parts)} (ring estimate)."
    )


def _join(parts: list[str]) -> str:
    return " and ".join(filter(None, [", ".join(parts[:-1]), parts[-1]]))
