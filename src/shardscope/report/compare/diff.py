"""`diff(before, after)`: what changed between two recordings, or results that hold recordings."""

from __future__ import annotations

from typing import Any

from shardscope.report.compare.changes import Changes
from shardscope.report.compare.compare import compare
from shardscope.report.model.result import read_recording


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
    recordings = [read_recording(result, asked_by="diff") for result in (before, after)]
    return compare(*recordings, is_folded=is_folded)
