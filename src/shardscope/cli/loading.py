"""Loads the recordings that the user names: one, those of several ranks, or those of several
instruments.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

from shardscope.comm.findings import review
from shardscope.compile.explain.compare import review_explanations
from shardscope.errors import RecordingError
from shardscope.record import Recording, expand_ranks, load, merge, merge_files
from shardscope.report.model.select import keep_modules, list_paths
from shardscope.report.text.style import shorten

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
    selected = keep_modules(recording, pattern)
    if selected is not None:
        return selected
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


def load_recordings(files: Sequence[str], report: Callable[[str], None]) -> list[Recording]:
    """Load recordings, one for each instrument; recordings of a run's ranks are merged."""
    by_instrument: dict[object, list[Recording]] = defaultdict(list)
    for file in files:
        report(f"reading {file}")
        recording = load(file)
        run = recording.run
        by_instrument[run.instruments, run.world_size].append(recording)
    merged = [
        recording_of_run
        for same_instrument in by_instrument.values()
        for recording_of_run in _join(same_instrument)
    ]
    report("comparing ranks")
    return [review_explanations(review(recording_of_run)) for recording_of_run in merged]


def _join(recordings: list[Recording]) -> list[Recording]:
    """Merge recordings of distinct ranks; recordings that share a rank are of separate runs."""
    ranks = [rank for recording in recordings for rank in expand_ranks(recording.run.ranks)]
    is_single_run = len(recordings) > 1 and len(set(ranks)) == len(ranks)
    return [merge(recordings)] if is_single_run else recordings
