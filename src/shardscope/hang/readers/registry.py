"""Recognizes files by their content, and reads them; many files, in two processes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import msgspec

from shardscope.errors import RecordingError
from shardscope.hang.evidence import FileFormat, FileReport, RankEvidence
from shardscope.hang.readers.compile_logs import is_compile_log, read_compile_log
from shardscope.hang.readers.debug_server import is_debug_dump, read_debug_dump
from shardscope.hang.readers.flight_recorder import MAX_JSON_BYTES, read_json, read_pickle
from shardscope.hang.readers.nccl_logs import is_nccl_log, read_nccl_log
from shardscope.hang.readers.nccl_ras import is_ras, read_ras, read_ras_json
from shardscope.hang.readers.recordings import read_recording
from shardscope.hang.readers.run_logs import read_log
from shardscope.hang.readers.stack_dumps import (
    is_faulthandler,
    is_py_spy,
    read_spy_json,
    read_stacks,
)
from shardscope.record.files import read_file
from shardscope.record.recording import Gap
from shardscope.record.text import describe_error, excerpt

_MIN_SHARED_BYTES = 48 * 1024**2  # of all files, above which a second process is worth its start
_MAX_LOG_BYTES = 192 * 1024**2
_HEAD_BYTES = 256 * 1024
_STREAM = re.compile(rb'^\s*\{[^\n]{0,400}"shardscope\.stream"')
_NUL = b"\0"
_TEXT_NAMES = (".log", ".out", ".err", ".txt", ".stderr", ".stdout")
Report = Callable[[str], None]


def read_paths(paths: Sequence[str], report: Report | None = None) -> list[FileReport]:
    """What each file says, in the order of the paths; a file of two formats has two reports.

    Args:
        paths: Files, which may be compressed with gzip.
        report: Is called with a sentence on the progress.
    """
    sizes = {path: _size_of(path) for path in paths}
    if sum(sizes.values()) < _MIN_SHARED_BYTES or len(paths) < 2:
        return _read_all(paths, report)
    halves = _split(paths, sizes)
    process = _start_worker(halves[1])
    own = _read_all(halves[0], report, total=len(paths))
    if process is None:
        shared = _read_all(halves[1], report, total=len(paths), before=len(halves[0]))
    else:
        shared = _collect(process, halves[1], report)
    by_path: dict[str, list[FileReport]] = {}
    for file_report in (*own, *shared):
        by_path.setdefault(file_report.path, []).append(file_report)
    return [file_report for path in paths for file_report in by_path.get(path, ())]


def _split(paths: Sequence[str], sizes: dict[str, int]) -> tuple[list[str], list[str]]:
    """Two halves of about equal size; the second is a little smaller, as a process must start."""
    halves: tuple[list[str], list[str]] = ([], [])
    totals = [0, _MIN_SHARED_BYTES // 8]
    for path in paths:
        half = totals.index(min(totals))
        halves[half].append(path)
        totals[half] += sizes[path]
    return halves


def _start_worker(paths: list[str]) -> subprocess.Popen[bytes] | None:
    """A process that reads these files; None if none can be started."""
    command = [sys.executable, "-m", "shardscope.hang.readers.worker"]
    folders = [folder for folder in sys.path if folder]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(folders)}
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
        )
        assert process.stdin is not None
        process.stdin.write(msgspec.json.encode(paths))
        process.stdin.close()
    except OSError:
        return None
    return process


def _collect(
    process: subprocess.Popen[bytes], paths: list[str], report: Report | None
) -> list[FileReport]:
    """What the other process has read; reads the files here if it failed."""
    assert process.stdout is not None
    data = process.stdout.read()
    process.stdout.close()
    if process.wait() == 0:
        try:
            return msgspec.msgpack.decode(data, type=list[FileReport])
        except (msgspec.MsgspecError, ValueError):
            pass
    return _read_all(paths, report)


def _read_all(
    paths: Iterable[str], report: Report | None, *, total: int = 0, before: int = 0
) -> list[FileReport]:
    reports: list[FileReport] = []
    for number, path in enumerate(paths, before + 1):
        if report is not None and number % 16 == 1:
            report(f"reading {excerpt(path)}" + (f" ({number} of {total})" if total else ""))
        reports.extend(read_path(path))
    return reports


def read_path(path: str) -> list[FileReport]:
    """What a file says, by format; one report without a format if it cannot be read."""
    try:
        data = _read_bytes(path)
        reports = _read_data(path, data)
    except RecordingError as error:
        reports = [_refuse(path, _shorten(str(error), path))]
    except MemoryError:
        reports = [_refuse(path, "it does not fit in memory")]
    except (ValueError, TypeError, KeyError, IndexError, OverflowError, RecursionError) as error:
        reports = [_refuse(path, f"it is damaged ({describe_error(error)})")]
    modified_ns = _modified_at(path)
    return [msgspec.structs.replace(found, modified_ns=modified_ns) for found in reports]


def _read_bytes(path: str) -> bytes:
    """The bytes of a file; of a very large text, the last part."""
    if _size_of(path) > _MAX_LOG_BYTES:
        with open(path, "rb") as file:
            head = file.read(_HEAD_BYTES)
            if _is_text(head) and not head.lstrip().startswith((b"{", b"[")):
                file.seek(-_MAX_LOG_BYTES, os.SEEK_END)
                return file.read()
    return read_file(path, max_bytes=MAX_JSON_BYTES)


def _read_data(path: str, data: bytes) -> list[FileReport]:
    start = data[:_HEAD_BYTES].lstrip()
    if not start:
        return [_refuse(path, "it is empty")]
    if start.startswith((b"\x80", b"(dp", b"(d")):
        return [_report_dump(path, *read_pickle(data, path))]
    if start.startswith(b"PAR1"):
        return [read_recording(path, is_stream=False)]
    if start.startswith((b"{", b"[")):
        found = _read_structured(path, data, start)
        if found is not None:
            return [found]
    if not _is_text(data[:_HEAD_BYTES]):
        return [_refuse(path, "it is no file of a known format")]
    return _read_text(path, data)


def _read_structured(path: str, data: bytes, start: bytes) -> FileReport | None:
    """A file in JSON; None if it only looks like one."""
    if _STREAM.match(start):
        return read_recording(path, is_stream=True)
    if start.startswith(b"["):
        return read_spy_json(data, path)
    if b'"communicators"' in start:
        return read_ras_json(data, path)
    if b'"pg_config"' in data or b'"entries"' in start:
        return _report_dump(path, *read_json(data, path))
    if b'"shardscope.recording"' in data:
        return read_recording(path, is_stream=False)
    return None


def _report_dump(path: str, evidence: RankEvidence, gaps: list[Gap]) -> FileReport:
    details = []
    if evidence.is_wrapped:
        details.append("earlier calls were overwritten")
    if not any(map(len, evidence.columns)):
        details.append("no calls: the recorder was off (TORCH_FR_BUFFER_SIZE), or had none")
    elif not evidence.has_sites:
        details.append("no stacks")
    return FileReport(
        path=path,
        format=FileFormat.FLIGHT_RECORDER,
        ranks=(evidence,),
        gaps=tuple(gaps),
        detail=", ".join(details),
    )


def _read_text(path: str, data: bytes) -> list[FileReport]:
    """A text, which may have lines of several formats: NCCL's log is often in that of the run."""
    if is_compile_log(data):
        return [read_compile_log(data, path)]
    text = data.decode("utf-8", "replace")
    if is_debug_dump(text):
        return [read_debug_dump(data, path)]
    if is_ras(text):
        return [read_ras(data, path)]
    if is_py_spy(text[:_HEAD_BYTES]):
        return [read_stacks(data, path)]
    reports = [read_nccl_log(data, path)] if is_nccl_log(text) else []
    log = read_log(data, path)
    has_events = any(evidence.events or evidence.columns for evidence in log.ranks)
    if has_events:
        reports.append(log)
    elif is_faulthandler(text):
        reports.append(read_stacks(data, path))
    if not reports:
        if not path.lower().removesuffix(".gz").endswith(_TEXT_NAMES):
            return [_refuse(path, "it is no file of a known format")]
        detail = "nothing in it is about a hang"
        reports.append(FileReport(path=path, format=FileFormat.LOG, detail=detail))
    return reports


def _is_text(data: bytes) -> bool:
    return _NUL not in data[:4096]


def _refuse(path: str, fact: str) -> FileReport:
    return FileReport(path=path, gaps=(Gap(place=path, fact=fact, is_loss=True),))


def _shorten(sentence: str, path: str) -> str:
    """A sentence of an error about a file, without the name of the file at its start."""
    sentence = sentence.removesuffix(".")
    for start in (f"'{path}' is not read: ", f"'{path}' is ", f"'{path}' "):
        if sentence.startswith(start):
            rest = sentence.removeprefix(start)
            return rest if not start.endswith("is ") else f"it is {rest}"
    return sentence


def _size_of(path: str) -> int:
    try:
        return os.path.getsize(path)
    except OSError:
        return 0


def _modified_at(path: str) -> int:
    try:
        return Path(path).stat().st_mtime_ns
    except OSError:
        return 0
