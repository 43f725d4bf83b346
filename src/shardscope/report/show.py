"""`show(result)` and `diff(before, after)`: print a result, and compare two."""

from __future__ import annotations

import sys
from typing import Any, TextIO, cast

from rich.console import Console, Group, RenderableType

from shardscope.record import Recording, TensorLayout
from shardscope.record.text import GuardedFile
from shardscope.report.compare.changes import Changes
from shardscope.report.compare.changes_text import render_changes
from shardscope.report.compare.compare_recordings import compare
from shardscope.report.runs.compare_runs import compare_values
from shardscope.report.text.shard_drawings import render_layout
from shardscope.report.text.summary import View, render_summary
from shardscope.report.text.views import VIEW_NAMES, render_views


def read_recording(result: Any, *, asked_by: str) -> Recording:
    """Return the recording itself, or that of a trace, an audit or a parallel program."""
    recording = result if isinstance(result, Recording) else getattr(result, "recording", None)
    if callable(recording):
        recording = recording()
    if not isinstance(recording, Recording):
        raise TypeError(
            f"{asked_by}() got {type(result).__name__}. Give it a recording, or what trace(), "
            "audit(), visualize_sharding() or parallelize() gives."
        )
    return recording


def show(
    result: Any, *, view: str | None = None, by: View = "module", is_folded: bool = True
) -> None:
    """Print a recording, trace, audit, tensor layout, parallel program or diff.

    Args:
        result: What to print.
        view: One subject, such as "memory", instead of the summary.
        by: How collectives are grouped: "module", "axis", "kind" or "cause".
        is_folded: Show identical layers in one row.

    Examples:
        >>> show(t.recording, by="cause")
    """
    file = cast(TextIO, GuardedFile(sys.stdout))
    console = Console(file=file, highlight=False, markup=False, emoji=False)
    console.print(_render(result, view=view, by=by, is_folded=is_folded))


def _render(result: Any, *, view: str | None, by: View, is_folded: bool) -> RenderableType:
    if isinstance(result, TensorLayout):
        return Group(*render_layout(result, is_complete=not is_folded))
    if isinstance(result, Changes):
        return render_changes(result, is_complete=not is_folded)
    recording = read_recording(result, asked_by="show")
    if view is None:
        return render_summary(recording, by=by, is_folded=is_folded)
    view_name = next(
        (view_name for name, view_name in VIEW_NAMES.items() if view in (name, view_name)), None
    )
    if view_name is None:
        raise ValueError(f"show() got view={view!r:.60}. Views are {', '.join(VIEW_NAMES)}.")
    return render_views(recording, [view_name], by=by, is_folded=is_folded)


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


def compare_runs(
    a: Any, b: Any, *, titles: tuple[str, str] = ("A", "B"), tolerance: float = 0.0
) -> Recording:
    """Compare the values that two runs sampled, as `shardscope compare` does.

    The runs may have different layouts and numbers of ranks. The result is a recording, whose
    findings name the first step, module and tensor that deviate by more than rounding explains.

    Args:
        a: A recording with values, of all ranks of a run, or a trace that was made with `values`.
        b: The same of the other run.
        titles: What the runs are called.
        tolerance: A relative deviation that is accepted in any tensor.

    Examples:
        >>> result = compare_runs(load("one.json.gz"), merge([load("0.json"), load("1.json")]))
        >>> show(result)
    """
    recordings = [read_recording(result, asked_by="compare_runs") for result in (a, b)]
    return compare_values(*recordings, titles=titles, tolerance=tolerance)
