"""The same changes in fewer rows: inputs change most often with what is sent."""

from __future__ import annotations

from collections.abc import Sequence

from shardscope.report.compare.changes import Area, Change

__all__ = ["AT_PEAK", "INPUT", "WIRE", "leave_out_input", "shorten_what"]

WIRE = ", sent"
INPUT = ", input"
AT_PEAK = " at the peak"


def leave_out_input(rows: Sequence[Change]) -> list[Change]:
    """The rows without those on inputs that have one on what is sent beside them."""
    known = {(row.path, row.what, row.status) for row in rows if WIRE in row.what}
    return [
        row
        for row in rows
        if row.area is not Area.BYTES
        or (row.path, row.what.replace(INPUT, WIRE), row.status) not in known
        or WIRE in row.what
    ]


def shorten_what(row: Change) -> str:
    """What a row is about, below a title that says which bytes it has."""
    ending = {Area.BYTES: WIRE, Area.MEMORY: AT_PEAK}.get(row.area, "")
    return row.what.replace(ending, "")
