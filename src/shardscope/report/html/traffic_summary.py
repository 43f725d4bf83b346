"""Traffic between ranks in a sentence, where a matrix of it would show nothing more."""

from __future__ import annotations

from collections import Counter

from shardscope.record import CollectiveKind, Recording, count_ranks
from shardscope.record.units import format_bytes
from shardscope.report.html.page import Matrix
from shardscope.report.model.traffic_totals import IdenticalRanks

_MAX_RECEIVERS = 4  # that are named
_TRANSFERS = (CollectiveKind.SEND, CollectiveKind.RECV)


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
