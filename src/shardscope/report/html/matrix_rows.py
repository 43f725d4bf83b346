"""The send matrix: bytes from rank to rank, or a sentence where a matrix would show no more."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter

from shardscope.record import CollectiveKind, Recording, count_ranks
from shardscope.record.units import format_bytes
from shardscope.report.html.page import Matrix
from shardscope.report.model.traffic_totals import (
    IdenticalRanks,
    TrafficSummary,
    describe_unknown,
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
