"""The same changes in fewer rows: what is put in changes most often with what is on the wire."""

from __future__ import annotations

from collections.abc import Sequence

from shardscope.report.compare.changes import Area, Change

__all__ = ["AT_PEAK", "INPUT", "WIRE", "leave_out_input", "shorten_what"]

WIRE = ", on the wire"
INPUT = ", put in"
AT_PEAK = " at the peak"


def leave_out_input(rows: Sequence[Change]) -> list[Change]:
    """The rows without those on what was put in that have one on the wire beside them."""
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
