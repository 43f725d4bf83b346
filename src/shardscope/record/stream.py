"""A recording written line by line while the run goes on, so that a killed rank leaves one.

Reading it back is `replay.py`'s.
"""

from __future__ import annotations

import os
import threading
from typing import final

from msgspec import Struct

from shardscope.errors import OutputError
from shardscope.record.encoding import encode_json
from shardscope.record.output import check_output, explain_existing, move_file
from shardscope.record.ranks import Natural
from shardscope.record.recording import SCHEMA, Collective, Finding, Gap, Group, Module, RunInfo
from shardscope.record.spans import Span, SpanBegin

__all__ = [
    "STREAM_FORMAT",
    "StreamEnd",
    "StreamHeader",
    "StreamLine",
    "StreamRecord",
    "StreamWriter",
]

STREAM_FORMAT = "shardscope.stream"
_CLOSE_ON_EXEC = getattr(os, "O_CLOEXEC", 0)

StreamRecord = Group | Module | Collective | Finding | Gap | Span


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
    """Any line after the first: exactly one of these."""

    group: Group | None = None
    module: Module | None = None
    collective: Collective | None = None
    finding: Finding | None = None
    gap: Gap | None = None
    begin: SpanBegin | None = None
    span: Span | None = None
    run: RunInfo | None = None  # instead of the header's: what came before is this rank's too
    end: StreamEnd | None = None


_KEYS: dict[type[StreamRecord], str] = {
    Group: "group",
    Module: "module",
    Collective: "collective",
    Finding: "finding",
    Gap: "gap",
    Span: "span",
}


@final
class StreamWriter:
    """Appends records to a file, each in one unbuffered write.

    Only the constructor raises. A write that fails later must not end a training run: the writer
    remembers why in `failure` and writes no more.
    """

    def __init__(self, path: str | os.PathLike[str], run: RunInfo, *, force: bool = False) -> None:
        self.path = os.path.abspath(path)  # the run may change its directory
        self.failure: str | None = None
        self._lock = threading.RLock()  # a signal handler may record while we write
        self._pid = os.getpid()
        self._num_records = 0
        self._file: int | None = _open(self.path, force=force)
        self._write_line(StreamHeader(run=run))

    @property
    def is_own(self) -> bool:
        """Whether this process writes it. A forked one has a copy of us but is not this rank."""
        return os.getpid() == self._pid

    def write(self, record: StreamRecord) -> None:
        """Append one record; safe from any thread, silent after `close` or a failure."""
        with self._lock:
            if self._write_line({_KEYS[type(record)]: record}):
                self._num_records += 1

    def write_begin(self, begin: SpanBegin) -> None:
        """A stretch begins; its span, written when it has ended, says so too."""
        with self._lock:
            self._write_line({"begin": begin})

    def write_run(self, run: RunInfo) -> None:
        """The run is this one and not the header's, for what was written too."""
        with self._lock:
            self._write_line({"run": run})

    def move(self, path: str | os.PathLike[str], *, force: bool = False) -> None:
        """Give the file another name and go on; OutputError if that cannot be."""
        with self._lock:
            if self.is_own:
                move_file(self.path, path, force=force)
                self.path = os.path.abspath(path)

    def reopen(self) -> None:
        """Go on after `close`: what is written now follows the end marker, and so overrules it."""
        with self._lock:
            if self._file is None and self.failure is None and self.is_own:
                try:
                    self._file = os.open(self.path, os.O_WRONLY | os.O_APPEND | _CLOSE_ON_EXEC)
                except OSError as error:
                    self._fail(error)

    def close(self, error: str | None = None) -> None:
        """Append the end marker and close the file; closing twice is fine.

        `error` is the exception that ended the trace, in one line.
        """
        with self._lock:
            self._write_line({"end": StreamEnd(num_records=self._num_records, error=error)})
            if self._file is not None and self.is_own:
                os.close(self._file)
            self._file = None

    def _write_line(self, line: object) -> bool:
        if self._file is None or self.failure is not None or not self.is_own:
            return False
        try:
            _write_all(self._file, encode_json(line) + b"\n")
        except (OSError, ValueError, TypeError, OverflowError) as error:
            self._fail(error)
            return False
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
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_TRUNC | _CLOSE_ON_EXEC
    if not force and not os.path.exists(path):
        flags |= os.O_EXCL  # of two ranks given the same name, one is told
    try:
        return os.open(path, flags, 0o666)
    except FileExistsError as error:
        raise OutputError(explain_existing(path)) from error
    except OSError as error:
        raise OutputError(
            f"cannot write the stream '{path}': {error.strerror}. "
            f"Choose a place that can be written and has room."
        ) from error


def _write_all(file: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]
