"""Recordings of one program by several instruments, each of one rank or of many."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

from shardscope.comm.review import review
from shardscope.compile.explain.compare import review_explanations
from shardscope.record import Recording, expand_ranks, load, merge

__all__ = ["load_recordings"]


def load_recordings(files: Sequence[str], report: Callable[[str], None]) -> list[Recording]:
    """Files as recordings, one for each instrument; what ranks of a run wrote is put together."""
    by_instrument: dict[object, list[Recording]] = defaultdict(list)
    for file in files:
        report(f"reading {file}")
        recording = load(file)
        run = recording.run
        by_instrument[run.instruments, run.world_size].append(recording)
    joined = [one for alike in by_instrument.values() for one in _join(alike)]
    report("comparing ranks")
    return [review_explanations(review(one)) for one in joined]


def _join(recordings: list[Recording]) -> list[Recording]:
    """One, if each is of other ranks; two of the same rank are of two runs."""
    ranks = [rank for one in recordings for rank in expand_ranks(one.run.ranks)]
    is_one_run = len(recordings) > 1 and len(set(ranks)) == len(ranks)
    return [merge(recordings)] if is_one_run else recordings
