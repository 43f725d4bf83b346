"""Bytes from rank to rank, as groups that run rings send them."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import islice

from shardscope.record import (
    Collective,
    CollectiveKind,
    RankSpan,
    Recording,
    count_ranks,
    rank_at,
)
from shardscope.report.layout import plural
from shardscope.report.page.communication import Matrix

__all__ = ["make_matrix"]

_MAX_SENDERS = 64
_MAX_RANKS = 256  # receivers, of whom there may be no records, included
_K = CollectiveKind

# From whom to whom.
Pair = tuple[int, int]


def make_matrix(recording: Recording) -> tuple[Matrix | None, str]:
    """The matrix, if its ranks are few enough to be drawn, and what to know of it.

    Each rank's row adds up to what its calls put on the wire. A broadcast or a reduce passes
    through the ring, as the count of its bytes has it.
    """
    if not recording.collectives:
        return None, ""
    num_senders = len({call.rank for call in recording.collectives})
    if num_senders > _MAX_SENDERS:
        return None, f"Not drawn: {num_senders:,} ranks are too many to tell apart."
    sent, num_unknown = _add_up(recording)
    ranks = sorted({rank for pair in sent for rank in pair})
    if len(ranks) > _MAX_RANKS:
        return None, f"Not drawn: what was sent went to {len(ranks):,} ranks."
    pairs = sorted(sent)
    matrix = Matrix(
        ranks=tuple(ranks),
        sender=tuple(bisect_left(ranks, sender) for sender, _ in pairs),
        receiver=tuple(bisect_left(ranks, receiver) for _, receiver in pairs),
        num_bytes=tuple(sent[pair] for pair in pairs),
    )
    return matrix, _describe(recording, num_unknown)


def _describe(recording: Recording, num_unknown: int) -> str:
    words = "As rings send: each rank to the next in its group."
    num_known, world_size = count_ranks(recording.run.ranks), recording.run.world_size
    if num_known < world_size:
        verb = "was" if num_known == 1 else "were"
        words += f" Only {num_known:,} of {world_size:,} ranks {verb} recorded: "
        words += "other rows are empty."
    if num_unknown:
        words += f" {plural(num_unknown, 'call')} left out: nobody knows to whom they went."
    return words


def _add_up(recording: Recording) -> tuple[Counter[Pair], int]:
    groups = {group.name: group.ranks for group in recording.groups}
    sent: Counter[Pair] = Counter()
    num_unknown = 0
    for call in recording.collectives:
        if call.wire_bytes:
            parts = list(_send(call, groups.get(call.group, ())))
            num_unknown += not parts
            for receiver, num_bytes in parts:
                sent[call.rank, receiver] += num_bytes
    return sent, num_unknown


def _send(call: Collective, ranks: tuple[RankSpan, ...]) -> Iterator[tuple[int, int]]:
    """To whom its rank, which is one of those of its group, sends how much."""
    if call.kind in (_K.SEND, _K.GATHER):
        if call.peer is not None and call.peer != call.rank:
            yield call.peer, call.wire_bytes
        return
    at, num_ranks = _find(call.rank, ranks), count_ranks(ranks)
    if at is None or num_ranks < 2:
        return
    if call.kind in (_K.ALL_TO_ALL, _K.SCATTER):
        # Past what can be drawn nobody has to know them one by one.
        others = [rank for rank in islice(_list(ranks), _MAX_RANKS + 2) if rank != call.rank]
        yield from zip(others, _share(call.wire_bytes, num_ranks - 1), strict=False)
    else:
        yield rank_at(ranks, (at + 1) % num_ranks), call.wire_bytes


def _list(ranks: Iterable[RankSpan]) -> Iterator[int]:
    return (rank for span in ranks for rank in span)


def _find(rank: int, ranks: Iterable[RankSpan]) -> int | None:
    """A rank's position among all those of the spans."""
    before = 0
    for span in ranks:
        steps, rest = divmod(rank - span.first, span.step)
        if rest == 0 and 0 <= steps < span.count:
            return before + steps
        before += span.count
    return None


def _share(num_bytes: int, num_parts: int) -> Iterator[int]:
    """Equal parts but for what is left over, which goes to the first ones byte by byte."""
    part, rest = divmod(num_bytes, num_parts)
    return (part + (index < rest) for index in range(num_parts))
