"""`diff(before, after)`: what changed, from whatever holds a recording."""

from __future__ import annotations

from typing import Any

from shardscope.report.compare.changes import Changes
from shardscope.report.compare.compare import compare
from shardscope.report.result import read_recording

__all__ = ["diff"]


def diff(before: Any, after: Any, *, is_folded: bool = True) -> Changes:
    """Compare two recordings: what was added, removed or changed, as `shardscope diff` shows it.

    The result is true if anything changed; `rows` has the changes, `show` prints them, and `str`
    gives one line for each.

    Args:
        before: A recording, trace, audit or anything else that `show` takes.
        after: The same, of the run to compare with it.
        is_folded: Show layers that changed in the same way in one row.

    Examples:
        >>> changes = diff(load("main.json.gz"), load("branch.json.gz"))
        >>> show(changes)
    """
    both = [read_recording(one, asked_by="diff") for one in (before, after)]
    return compare(*both, is_folded=is_folded)
