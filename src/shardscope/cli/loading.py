"""Load the recordings that the user names: one, or those of several ranks merged into one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from shardscope.comm.review import review
from shardscope.compile.explain.compare import review_explanations
from shardscope.errors import RecordingError
from shardscope.record import Recording, load, merge_files
from shardscope.report.names import shorten
from shardscope.report.select import keep_modules, list_paths

__all__ = ["choose_modules", "load_reviewed"]

_MAX_NAMED = 5


def load_reviewed(files: Sequence[str], report: Callable[[str], None]) -> Recording:
    """Load one file or merge several, and add the findings that comparing ranks gives."""
    if len(files) > 1:
        recording = merge_files(files, report=report)
    else:
        report(f"reading {files[0]}")
        recording = load(files[0])
    report("comparing ranks")
    return review_explanations(review(recording))


def choose_modules(recording: Recording, pattern: str) -> Recording:
    """The part of a recording that belongs to matching modules and their children."""
    kept = keep_modules(recording, pattern)
    if kept is not None:
        return kept
    named = [path for path in list_paths(recording) if path][:_MAX_NAMED]
    advice = (
        f"It has {', '.join(shorten(name, 60) for name in named)}, …; a pattern such as "
        "'layers.*.attention' matches in every layer."
        if named
        else "It has no modules at all."
    )
    raise RecordingError(
        f"the recording has no module that matches {shorten(pattern, 80)!r}. {advice}"
    )
