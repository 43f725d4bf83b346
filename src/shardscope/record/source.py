"""Records shared by others: a source line, a phase of the step, an axis of a mesh."""

from __future__ import annotations

from enum import StrEnum

from shardscope.record.base import Record
from shardscope.record.ranks import Natural


class Phase(StrEnum):
    """What the training step was doing."""

    FORWARD = "forward"
    BACKWARD = "backward"
    RECOMPUTE = "recompute"
    OPTIMIZER = "optimizer"
    OUTSIDE = "outside"


class Axis(Record, frozen=True, kw_only=True, gc=False):
    """One axis of a device mesh."""

    name: str
    size: Natural


class Source(Record, frozen=True, kw_only=True, gc=False):
    """A line of the user's program."""

    file: str
    line: Natural
    function: str = ""
    text: str = ""
