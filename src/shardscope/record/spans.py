"""Named stretches of time that a run was asked to measure."""

from __future__ import annotations

from msgspec import Struct

from shardscope.record.ranks import Natural, Rank

__all__ = ["Span"]


class Span(Struct, frozen=True, kw_only=True, gc=False):
    """One stretch of one phase on one rank, since the recording began.

    `device` is whose clock it was: "cpu", or "cuda" where events on the device's stream timed it.
    """

    rank: Rank
    name: str
    start_ns: Natural
    duration_ns: Natural
    device: str = "cpu"
    thread: str = ""
    depth: Natural = 0  # how many spans of the same thread it lies within
