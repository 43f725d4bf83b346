"""Bytes from rank to rank, as groups that run rings send them."""

from __future__ import annotations

from bisect import bisect_left

from shardscope.record import Recording, count_ranks
from shardscope.report.page.communication import Matrix
from shardscope.report.pairs import describe_unknown, sum_pairs

__all__ = ["make_matrix"]

_MAX_SENDERS = 64
_MAX_RANKS = 256  # receivers, of whom there may be no records, included


def make_matrix(recording: Recording) -> tuple[Matrix | None, str]:
    """The matrix, if its ranks are few enough to be drawn, and what to know of it."""
    if not recording.collectives:
        return None, ""
    num_senders = len({call.rank for call in recording.collectives})
    if num_senders > _MAX_SENDERS:
        return None, f"Not drawn: {num_senders:,} ranks are too many to tell apart."
    found = sum_pairs(recording)
    if found is None:
        return None, "Not drawn: too many receiving ranks."
    ranks = sorted({rank for pair in found.sent for rank in pair})
    if len(ranks) > _MAX_RANKS:
        return None, f"Not drawn: what was sent went to {len(ranks):,} ranks."
    pairs = sorted(found.sent)
    matrix = Matrix(
        ranks=tuple(ranks),
        sender=tuple(bisect_left(ranks, sender) for sender, _ in pairs),
        receiver=tuple(bisect_left(ranks, receiver) for _, receiver in pairs),
        num_bytes=tuple(found.sent[pair] for pair in pairs),
    )
    return matrix, _describe(recording, found.num_unknown)


def _describe(recording: Recording, num_unknown: int) -> str:
    words = "As rings send: each rank to the next in its group."
    num_known, world_size = count_ranks(recording.run.ranks), recording.run.world_size
    if num_known < world_size:
        verb = "was" if num_known == 1 else "were"
        words += f" Only {num_known:,} of {world_size:,} ranks {verb} recorded: "
        words += "other rows are empty."
    if num_unknown:
        words += f" {describe_unknown(num_unknown)}."
    return words
