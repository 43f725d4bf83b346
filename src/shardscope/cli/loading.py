"""Recordings that the user names: one, or those of several ranks as one, with what they show."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from os.path import realpath

from shardscope.comm.review import review
from shardscope.compile.explain.compare import review_explanations
from shardscope.errors import OutputError, RecordingError
from shardscope.record import Recording, load, merge_files
from shardscope.report.names import shorten
from shardscope.report.select import keep_modules, list_paths

__all__ = ["check_apart", "choose_modules", "load_reviewed"]

_MAX_NAMED = 5


def load_reviewed(files: Sequence[str], report: Callable[[str], None]) -> Recording:
    """One file as it is, several merged; findings that ranks show together are added."""
    if len(files) > 1:
        recording = merge_files(files, report=report)
    else:
        report(f"reading {files[0]}")
        recording = load(files[0])
    report("comparing ranks")
    return review_explanations(review(recording))


def check_apart(output: str, files: Sequence[str]) -> None:
    """Raise OutputError if what is written would take the place of what is read."""
    # Links count: what stands behind a name is lost all the same.
    target = realpath(output)
    for file in files:
        if realpath(file) == target:
            raise OutputError(
                f"'{output}' is the recording that is read, and would be lost. Name another file."
            )


def choose_modules(recording: Recording, pattern: str) -> Recording:
    """What belongs to the modules that match, and to those below them."""
    kept = keep_modules(recording, pattern)
    if kept is not None:
        return kept
    named = [path for path in list_paths(recording) if path][:_MAX_NAMED]
    advice = (
        f"It has {', '.join(shorten(name, 60) for name in named)}, …; a pattern such as "
        "'layers.*.attention' matches in every layer."
        if named
        else "It names no modules at all."
    )
    raise RecordingError(
        f"the recording has no module that matches {shorten(pattern, 80)!r}. {advice}"
    )
