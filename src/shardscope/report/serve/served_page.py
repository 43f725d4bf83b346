"""Makes the page of a recording for a server; collectives of a large run stay with the server."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import NamedTuple

from msgspec.structs import replace

from shardscope.record import Gap, Recording
from shardscope.record.arrow import make_arrow
from shardscope.record.codec import open_parquet
from shardscope.record.parquet import is_parquet_file
from shardscope.report.html.communication_rows import MAX_CALLS
from shardscope.report.html.html import build_page, render_page
from shardscope.report.model.clocks import has_clock
from shardscope.report.model.traffic_totals import TrafficSummary
from shardscope.report.serve.call_windows import CallWindows
from shardscope.report.serve.large_run import summarize_file

_AS_SAVED = (
    "As they were saved with the file: the ranks of a run this large are compared by `shardscope "
    "merge` and `shardscope show`, and not when it is served."
)
_NOT_COMPARED = "its ranks were not compared, so its findings are those that the file had"


class ServedPage(NamedTuple):
    """A document, and the collectives that it asks its server for, if there are many."""

    document: str
    calls: CallWindows | None


def make_served_page(
    path: str | os.PathLike[str], load_recording: Callable[[], Recording]
) -> ServedPage:
    """Make the page of a file; `load_recording` loads one that is not a large Parquet file."""
    if not is_parquet_file(path):
        return _make_loaded(path, load_recording())
    file, rest = open_parquet(path)
    if file.num_calls <= MAX_CALLS:
        return _make_loaded(path, load_recording())
    table = file.read_table()
    recording, summary = summarize_file(file, rest, table)
    note = _AS_SAVED if summary.num_senders > 1 else ""
    if note:
        gap = Gap(place="shardscope serve", fact=_NOT_COMPARED)
        recording = replace(recording, gaps=(*recording.gaps, gap))
    calls = CallWindows(table, world_size=rest.run.world_size, is_timed=has_clock(recording))
    return _render(path, recording, calls, summary, note)


def _make_loaded(path: str | os.PathLike[str], recording: Recording) -> ServedPage:
    if len(recording.collectives) <= MAX_CALLS:
        return _render(path, recording, None, None)
    calls = CallWindows(
        make_arrow(recording),
        world_size=recording.run.world_size,
        is_timed=has_clock(recording),
    )
    return _render(path, recording, calls, None)


def _render(
    path: str | os.PathLike[str],
    recording: Recording,
    calls: CallWindows | None,
    summary: TrafficSummary | None,
    findings_note: str = "",
) -> ServedPage:
    page = build_page(
        recording,
        files=[os.fspath(path)],
        summary=summary,
        served=calls,
        findings_note=findings_note,
    )
    return ServedPage(render_page(page, is_served=True), calls)
