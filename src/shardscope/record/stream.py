"""Writes a recording line by line during the run, so that a killed rank leaves one.

`StreamWriter` appends the lines; `RankStream` also names the file, once the rank is known.
`replay.py` reads it back.
"""

from __future__ import annotations

import errno
import itertools
import os
import select
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import final

from msgspec import Struct

from shardscope.errors import OutputError
from shardscope.record.encoding import encode_json
from shardscope.record.files import (
    check_output,
    explain_existing,
    move_file,
    name_for_rank,
    open_special,
)
from shardscope.record.profile_records import Span, SpanBegin
from shardscope.record.ranks import Natural
from shardscope.record.recording import SCHEMA, Collective, Finding, Gap, Group, Module, RunInfo
from shardscope.record.value_records import ValueSample

STREAM_FORMAT = "shardscope.stream"
_MAX_WAIT_MS = 1_000  # for the reader of a pipe to make room

StreamRecord = Group | Module | Collective | Finding | Gap | Span | ValueSample


class StreamHeader(Struct, frozen=True, kw_only=True):
    """The first line."""

    format: str = STREAM_FORMAT
    schema: int = SCHEMA
    run: RunInfo


class StreamEnd(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The last line's content: the trace was left after so many records.

    `error` is the type and the first line of the exception that it was left with, if any.
    """

    num_records: Natural
    error: str | None = None


class StreamLine(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Any line after the first: exactly one of these fields is set."""

    group: Group | None = None
    module: Module | None = None
    collective: Collective | None = None
    finding: Finding | None = None
    gap: Gap | None = None
    begin: SpanBegin | None = None
    span: Span | None = None
    value: ValueSample | None = None
    run: RunInfo | None = None  # instead of the header's: what came before is this rank's too
    end: StreamEnd | None = None


_KEYS: dict[type[StreamRecord], str] = {
    Group: "group",
    Module: "module",
    Collective: "collective",
    Finding: "finding",
    Gap: "gap",
    Span: "span",
    ValueSample: "value",
}


@final
class StreamWriter:
    """Appends records to a file, each in one unbuffered write.

    Only the constructor raises, if the file cannot be opened or not even its first line written. A
    write that fails later must not end a training run: the writer remembers why in `failure` and
    writes no more. If the run closes our descriptor, as programs do that close all of them, the
    file is opened again, and the file that has the number by then is left alone.
    """

    def __init__(self, path: str | os.PathLike[str], run: RunInfo, *, force: bool = False) -> None:
        self.path = os.path.abspath(path)  # the run may change its directory
        self.failure: str | None = None
        self._lock = threading.RLock()  # a signal handler may record while we write
        self._pid = os.getpid()
        self._num_records = 0
        self._file: int | None = _open(self.path, force=force)
        self._identity = _identify(self._file)
        if not self._write_line(StreamHeader(run=run)):
            self.close()
            reason = (self.failure or "").rpartition(": ")[2]
            raise OutputError(_explain_stream(self.path, reason))

    @property
    def is_own(self) -> bool:
        """Whether this process opened it: a forked process has a copy but is not this rank."""
        return os.getpid() == self._pid

    def write(self, record: StreamRecord) -> None:
        """Append one record; safe from any thread, silent after `close` or a failure."""
        with self._lock:
            if self._write_line({_KEYS[type(record)]: record}):
                self._num_records += 1

    def write_begin(self, begin: SpanBegin) -> None:
        """Append the beginning of a phase; its span is written when the phase is left."""
        with self._lock:
            self._write_line({"begin": begin})

    def write_run(self, run: RunInfo) -> None:
        """Append a run that replaces the header's, for earlier records too."""
        with self._lock:
            self._write_line({"run": run})

    def move(self, path: str | os.PathLike[str], *, force: bool = False) -> None:
        """Rename the file and continue; raises OutputError if that is not possible."""
        with self._lock:
            if self.is_own:
                move_file(self.path, path, force=force)
                self.path = os.path.abspath(path)

    def reopen(self) -> None:
        """Continue after `close`: records after an end marker make that marker void."""
        with self._lock:
            if self._file is None and self.failure is None and self.is_own:
                self._open_again()

    def close(self, error: str | None = None) -> None:
        """Append the end marker and close the file; closing twice is fine.

        `error` is the exception that ended the trace, in one line.
        """
        with self._lock:
            self._write_line({"end": StreamEnd(num_records=self._num_records, error=error)})
            if self._has_descriptor() and self.is_own:
                assert self._file is not None
                os.close(self._file)
            self._file = None

    def _write_line(self, line: object) -> bool:
        if self._file is None or self.failure is not None or not self.is_own:
            return False
        try:
            if not self._has_descriptor() and not self._open_again():
                return False
            _write_all(self._file, encode_json(line) + b"\n")
        except (OSError, ValueError, TypeError, OverflowError) as error:
            self._fail(error)
            return False
        return True

    def _has_descriptor(self) -> bool:
        """Whether the descriptor is still that of the file that we opened."""
        try:
            return self._file is not None and _identify(self._file) == self._identity
        except OSError:
            return False

    def _open_again(self) -> bool:
        """Open the file again to append to it; fails if another file has its name now."""
        self._file = None
        try:
            descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK)
        except OSError as error:
            self._fail(error)
            return False
        if _identify(descriptor) != self._identity:
            os.close(descriptor)
            self._fail(OSError(errno.ESTALE, "another file now has its name"))
            return False
        self._file = descriptor
        return True

    def _fail(self, error: Exception) -> None:
        reason = (isinstance(error, OSError) and error.strerror) or str(error)
        self.failure = f"stream '{self.path}' stops after {self._num_records} records: {reason}"


def _open(path: str, *, force: bool) -> int:
    if path.lower().endswith(".gz"):
        raise OutputError(
            f"the stream '{path}' would not be compressed: each line is written as it comes. Leave "
            f".gz out of its name; merging can write a compressed recording."
        )
    check_output(path, force=force)
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_TRUNC | os.O_NONBLOCK
    exists = os.path.exists(path)
    if not force and not exists:
        flags |= os.O_EXCL  # of two ranks that have the same name, the second is refused
    try:
        if exists and not os.path.isfile(path):
            return open_special(path)
        return os.open(path, flags, 0o666)
    except FileExistsError as error:
        raise OutputError(explain_existing(path)) from error
    except OSError as error:
        raise OutputError(_explain_stream(path, error.strerror or str(error))) from error


def _explain_stream(path: str, reason: str) -> str:
    return (
        f"cannot write the stream '{path}': {reason}. Choose a writable location with free space."
    )


def _identify(descriptor: int) -> tuple[int, int]:
    """The device and inode of a file, which identify it."""
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino


def _write_all(descriptor: int, data: bytes) -> None:
    """Write all data; raises BlockingIOError if a pipe stays full, as the run must not wait."""
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(descriptor, view) :]
        except BlockingIOError:
            poller = select.poll()
            poller.register(descriptor, select.POLLOUT)
            if not poller.poll(_MAX_WAIT_MS):
                raise


@final
class RankStream:
    """Writes to a path in which `{rank}` is "pid" and the process id until the rank is known.

    The rank is known once a world is initialized, which may never happen; events before that are
    written too. Until then, the process id keeps the files of different ranks apart.
    """

    def __init__(self, path: str | Path, run: RunInfo, *, force: bool, is_rank_known: bool) -> None:
        self._path = os.path.abspath(path)  # the run may change the working directory
        self._force = force
        self._run = run
        is_named = is_rank_known or "{rank}" not in self._path
        self._writer = self._open() if is_named else self._open_unnamed()

    @property
    def failure(self) -> str | None:
        """Why writing failed; None while it works."""
        return self._writer.failure

    def write(self, record: StreamRecord) -> None:
        """Append one record."""
        self._writer.write(record)

    def write_begin(self, begin: SpanBegin) -> None:
        """Append that a span has begun."""
        self._writer.write_begin(begin)

    def set_run(self, run: RunInfo, early: Iterable[StreamRecord]) -> None:
        """Set the run, also for what was written already; OutputError if the file name is in use.

        `early` are the records that a process forked from the traced one writes again.
        """
        if not self._writer.is_own:
            self._open_forked(run, early)
        self.describe_run(run)
        self.rename()

    def describe_run(self, run: RunInfo) -> None:
        """Update the run, whose rank is unchanged."""
        if run != self._run:
            self._writer.write_run(run)
        self._run = run

    def rename(self) -> None:
        """Rename the file for the rank; on OutputError it keeps its name."""
        path = self._named()
        if not self._writer.is_own or path == self._writer.path:
            return
        try:
            self._writer.move(path, force=self._force)
        except OutputError as error:
            raise OutputError(f"{error} The stream stays in '{self._writer.path}'.") from error

    def reopen(self) -> None:
        """Continue after `close`."""
        self._writer.reopen()

    def close(self, error: str | None = None) -> None:
        """End the stream, with the `error` that ended the trace, if any."""
        self._writer.close(error)

    def _named(self) -> str:
        return str(name_for_rank(self._path, self._run.ranks[0].first))

    def _open(self) -> StreamWriter:
        return StreamWriter(self._named(), self._run, force=self._force)

    def _open_unnamed(self) -> StreamWriter:
        for number in itertools.count():  # processes on other machines may have the same id
            process = f"pid{os.getpid()}" + (f"-{number}" if number else "")
            path = self._unnamed_path(process)
            try:
                return StreamWriter(path, self._run)
            except OutputError:
                if not os.path.isfile(path):
                    raise
        raise AssertionError("numbers do not end")

    def _unnamed_path(self, process: str) -> str:
        folder, name = os.path.split(self._path)
        if "{rank}" in folder:  # no folder per process
            folder, name = os.path.dirname(folder[: folder.index("{rank}")]), f"{{rank}}-{name}"
        return os.path.join(folder, name.replace("{rank}", process))

    def _open_forked(self, run: RunInfo, early: Iterable[StreamRecord]) -> None:
        """Open a file for this forked process: the current one is the parent's."""
        parents, self._run = self._writer.path, run
        if self._named() == parents:
            raise OutputError(
                f"'{parents}' is the stream of the process that this one was forked from. "
                "Put {rank} into the name, so that each rank has its own."
            )
        self._writer = self._open()
        for record in early:
            self._writer.write(record)
