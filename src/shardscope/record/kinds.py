"""Kinds of collectives."""

from __future__ import annotations

from enum import StrEnum

__all__ = ["CollectiveKind"]


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
