"""Recordings that the user names: one, or those of several ranks as one, with what they show."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from shardscope.comm.review import review
from shardscope.compile.explain.compare import review_explanations
from shardscope.record import Recording, load, merge_files

__all__ = ["load_reviewed"]


def load_reviewed(files: Sequence[str], report: Callable[[str], None]) -> Recording:
    """One file as it is, several merged; findings that ranks show together are added."""
    if len(files) > 1:
        recording = merge_files(files, report=report)
    else:
        report(f"reading {files[0]}")
        recording = load(files[0])
    report("comparing ranks")
    return review_explanations(review(recording))
