"""Explains a hang, or which rank is slow, from the files that ranks left behind."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from shardscope.errors import RecordingError
from shardscope.hang.causes import find_causes
from shardscope.hang.evidence import FileReport
from shardscope.hang.hang_findings import make_findings
from shardscope.hang.mismatch import find_divergences
from shardscope.hang.readers import read_paths
from shardscope.hang.run import HangRun, make_run_state, read_run
from shardscope.hang.slow_ranks import find_skew
from shardscope.hang.sources import list_files
from shardscope.hang.summary import (
    list_divergences,
    list_progress,
    list_sources,
    list_states,
    list_waits,
)
from shardscope.hang.unknowns import list_unknowns
from shardscope.hang.waits import HangKind, find_hang_state
from shardscope.record.hang_records import HangAnalysis
from shardscope.record.ranks import compress_ranks
from shardscope.record.recording import Gap, Recording, RunInfo

Names = str | os.PathLike[str]


def explain_hang(
    files: Names | Sequence[Names], report: Callable[[str], None] | None = None
) -> Recording:
    """Explain why a run hangs, from what its ranks left behind.

    Files of all formats can be mixed: streams and recordings of `trace`, dumps of torch's Flight
    Recorder and debug server, output of `ncclras`, NCCL's logs, stacks of py-spy and faulthandler,
    TORCH_TRACE folders and logs of the run. Nothing in them is executed.

    Args:
        files: Files, folders and patterns, one or several.
        report: Is called with a sentence on the progress.

    Returns:
        A recording whose `hangs` has the analysis, and whose findings name the likely cause.

    Raises:
        RecordingError: If no file can be read.

    Examples:
        >>> recording = explain_hang("dumps/")
        >>> print(recording.hangs[0].causes[0].fact)
    """
    names = [files] if isinstance(files, str | os.PathLike) else list(files)
    paths, in_folders = list_files([os.fspath(name) for name in names])
    with _collector_paused():
        reports = read_paths(paths, report)
        reports, num_others = _leave_out_others(reports, in_folders)
        if not any(file_report.format is not None for file_report in reports):
            raise RecordingError(_explain_nothing(reports, num_others))
        if report is not None:
            report("comparing ranks")
        return explain_reports(reports, num_others)


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Without the garbage collector, which would go through millions of entries again and again."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def explain_reports(reports: Sequence[FileReport], num_others: int = 0) -> Recording:
    """The same from reports that were read; `num_others` counts files of unknown formats."""
    run = read_run(reports)
    calls = run.calls
    diverged = find_divergences(calls)
    run_state = make_run_state(run)
    positions = {name: divergence.position for name, divergence in diverged.items()}
    state = find_hang_state(run_state, calls, positions)
    causes = find_causes(run, state, run_state, diverged)
    is_hang = state is not None or bool(causes)
    skews, slow_ranks = ((), ()) if is_hang else find_skew(run)
    progress, num_level = list_progress(run, state, diverged)
    analysis = HangAnalysis(
        is_hang=is_hang,
        world_size=run.world_size if run.is_world_size_known else None,
        ranks=compress_ranks(sorted(run.ranks)),
        missing_ranks=compress_ranks(run.missing_ranks),
        sources=list_sources(run),
        causes=tuple(causes),
        divergences=list_divergences(run, diverged),
        waits=list_waits(state),
        cycle=tuple(state.ranks) if state is not None and state.kind is HangKind.CYCLE else (),
        progress=progress,
        num_level_groups=num_level,
        states=list_states(run),
        slow_ranks=slow_ranks,
        skews=skews,
        unknowns=list_unknowns(run),
    )
    return Recording(
        run=_describe_run(run),
        findings=make_findings(analysis),
        gaps=(*run.gaps, *_count_others(num_others)),
        hangs=(analysis,),
    )


def _leave_out_others(
    reports: Sequence[FileReport], in_folders: set[str]
) -> tuple[list[FileReport], int]:
    """Without the files of a folder that are of no known format, which need not be of the run."""
    kept = [
        file_report
        for file_report in reports
        if file_report.format is not None
        or file_report.path not in in_folders
        or not any("known format" in gap.fact for gap in file_report.gaps)
    ]
    return kept, len(reports) - len(kept)


def _explain_nothing(reports: Sequence[FileReport], num_others: int) -> str:
    facts = [f"'{gap.place}': {gap.fact}" for file_report in reports for gap in file_report.gaps]
    if not facts:
        return (
            f"none of the {num_others:,} files there is of a known format. Name streams, Flight "
            "Recorder dumps, output of ncclras, NCCL logs, stacks, TORCH_TRACE folders or logs."
        )
    more = f" (and {len(facts) - 1:,} more files)" if len(facts) > 1 else ""
    return f"no file can be read; {facts[0]}{more}. Check that the files are complete."


def _count_others(num_others: int) -> list[Gap]:
    if not num_others:
        return []
    files = "file is" if num_others == 1 else "files are"
    return [Gap(place="files", fact=f"{num_others:,} more {files} of no known format")]


def _describe_run(run: HangRun) -> RunInfo:
    versions = {
        piece.version
        for files in run.ranks.values()
        for piece in files.evidence
        if piece.version and piece.format in ("stream", "recording")
    }
    return RunInfo(
        torch_version=", ".join(sorted(versions)),
        shardscope_version="",
        world_size=max(1, run.world_size or 1),
        ranks=compress_ranks(sorted(run.ranks)),
        instruments=("hang",),
    )
