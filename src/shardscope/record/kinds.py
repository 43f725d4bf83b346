"""Kinds of collectives, and the bytes that a ring sends for each."""

from __future__ import annotations

from enum import StrEnum


class CollectiveKind(StrEnum):
    """What a collective does, whatever torch calls the op that did it."""

    ALL_REDUCE = "all_reduce"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_TO_ALL = "all_to_all"
    BROADCAST = "broadcast"
    REDUCE = "reduce"
    GATHER = "gather"
    SCATTER = "scatter"
    SEND = "send"
    RECV = "recv"
    BARRIER = "barrier"


def wire_bytes(kind: CollectiveKind, input_bytes: int, output_bytes: int, num_ranks: int) -> int:
    """Bytes each rank sends if the group runs a ring, averaged over its ranks.

    The factors are those by which bus bandwidth is commonly quoted: 2(n-1)/n of the payload for an
    all-reduce, (n-1)/n of the full tensor for all-gather, reduce-scatter, scatter and all-to-all,
    all of it for a broadcast or a reduce. A receive and the root of a gather send nothing: their
    bytes are counted where they are sent.
    """
    fraction = (num_ranks - 1) / num_ranks
    if num_ranks == 1 or kind in (CollectiveKind.RECV, CollectiveKind.BARRIER):
        return 0
    if kind is CollectiveKind.GATHER and output_bytes:
        return 0
    if kind is CollectiveKind.ALL_REDUCE:
        return round(2 * fraction * input_bytes)
    if kind is CollectiveKind.ALL_GATHER:
        return round(fraction * output_bytes)
    if kind in (CollectiveKind.REDUCE_SCATTER, CollectiveKind.ALL_TO_ALL, CollectiveKind.SCATTER):
        return round(fraction * input_bytes)
    return input_bytes
