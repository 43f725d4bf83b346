"""`diff(before, after)`: what changed, from whatever holds a recording."""

from __future__ import annotations

from typing import Any

from shardscope.report.compare.changes import Changes
from shardscope.report.compare.compare import compare
from shardscope.report.result import read_recording

__all__ = ["diff"]


def diff(before: Any, after: Any, *, is_folded: bool = True) -> Changes:
    """What was added, is gone or changed from one recording to another; as `shardscope diff`.

    Takes recordings, traces, audits and whatever else `show` takes. The result is true if anything
    changed; `rows` are the changes, `show` prints them, `str` has a line for each.
    """
    both = [read_recording(one, asked_by="diff") for one in (before, after)]
    return compare(*both, is_folded=is_folded)
