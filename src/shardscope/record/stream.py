"""Writes a recording line by line during the run, so that a killed rank leaves one.

`StreamWriter` writes the lines of `stream_lines.py` to an `AppendFile`; `rank_stream.py` also names
the file, once the rank is known. `replay.py` reads it back.
"""

from __future__ import annotations

import itertools
import os
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from math import inf
from typing import final

from msgspec.structs import replace

from shardscope.errors import OutputError
from shardscope.record.append_file import AppendFile, explain_unwritable
from shardscope.record.encoding import encode_json
from shardscope.record.profile_records import Span, SpanBegin
from shardscope.record.recording import (
    Collective,
    Finding,
    Gap,
    Group,
    Module,
    RankProcess,
    RunInfo,
)
from shardscope.record.stream_lines import StreamEnd, StreamHeader, StreamRecord
from shardscope.record.stream_state import StreamState, Tally
from shardscope.record.value_records import ValueSample

_KEYS: dict[type[StreamRecord], str] = {
    Group: "group",
    Module: "module",
    Collective: "collective",
    Finding: "finding",
    Gap: "gap",
    RankProcess: "process",
    Span: "span",
    ValueSample: "value",
}


@final
class CallTemplate:
    """A collective that others repeat.

    In each part of the stream, the first of them is written in full, with a number, and later ones
    as short lines with that number.
    """

    __slots__ = ("num_bytes", "number", "part", "positions", "record", "tally")

    def __init__(self, record: Collective) -> None:
        self.record = record
        # From here on set by the writer.
        self.number = -1
        self.part: object = None  # in which it was written last
        # Of input, output and traffic, in the line that has it in full.
        self.num_bytes: tuple[int, int, int] | None = None
        self.positions: Iterator[int] = iter(())  # of the collectives of its group
        self.tally = Tally()


@final
class StreamWriter:
    """Appends records to a file, each in one unbuffered write.

    Only the constructor raises, if the file cannot be opened or not even its first line written. A
    write that fails later must not end a training run: the writer remembers why in `failure` and
    writes no more.

    With `max_bytes`, only the newest lines are kept, at least half as many bytes: the stream
    consists of two parts, and when the newer is full, a file with that and what later lines need
    takes the place of the old one.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        run: RunInfo,
        *,
        force: bool = False,
        max_bytes: int | None = None,
    ) -> None:
        self.failure: str | None = None
        self.is_own = True  # this process opened it: a forked process has a copy, but not this rank
        self._file = AppendFile(os.path.abspath(path), force=force)  # the run may change its folder
        self._lock = threading.RLock()  # a signal handler may record while we write
        self._is_blocked = False  # closed, failed, of another process, or replacing its file
        self._num_records = self._num_calls = 0
        self._numbers = itertools.count()  # of templates
        self._positions: dict[str, Iterator[int]] = {}  # of collectives, by group
        self._returns = b""  # lines that are written with the next
        self._state = StreamState(run)
        self._part: object = object()  # identifies the current part
        self._part_run = run  # when the current part began
        # What is not a file, such as a pipe, keeps nothing that could be dropped.
        self._is_limited = max_bytes is not None and self._file.is_regular
        self._part_bytes = (max_bytes or 0) // 2
        self._part_start = 0
        self._part_end = inf
        self._is_accounting = self._is_rotating = False
        self._delayed: list[bytes] = []  # lines of a signal handler that runs in between
        self._write_line(StreamHeader(run=run))
        if self._is_limited:
            self._part_start = self._file.num_bytes
            self._part_end = self._part_start + self._part_bytes
            self._write_line({"part": self._state.describe()})
        if self.failure is not None:
            self.close()
            raise OutputError(explain_unwritable(self.path, self.failure.rpartition(": ")[2]))
        _writers.add(self)

    @property
    def path(self) -> str:
        """The file as it is named now."""
        return self._file.path

    def write(self, record: StreamRecord) -> None:
        """Append one record; safe from any thread, silent after `close` or a failure."""
        with self._lock, self._accounting():
            if self._write_line({_KEYS[type(record)]: record}):
                self._num_records += 1
                if self._is_limited:
                    self._state.add(record)

    def write_call(
        self, template: CallTemplate, start_ns: int | None, num_bytes: tuple[int, int, int]
    ) -> tuple[int, int]:
        """Append a collective that is as `template`, but for what is passed besides.

        Returns its position among all collectives, and that among those of its group.
        """
        with self._lock:
            is_outermost, self._is_accounting = not self._is_accounting, True
            try:
                order, self._num_calls = self._num_calls, self._num_calls + 1
                if template.part is not self._part:
                    self._prepare(template)
                group_order = next(template.positions)
                if num_bytes != template.num_bytes:
                    is_written = self._write_sizes(
                        template, order, group_order, start_ns, num_bytes
                    )
                elif start_ns is None:
                    is_written = self._append(
                        b'{"repeat":[%d,%d,%d]}\n' % (template.number, order, group_order)
                    )
                else:
                    is_written = self._append(
                        b'{"repeat":[%d,%d,%d,%d]}\n'
                        % (template.number, order, group_order, start_ns)
                    )
                if is_written:
                    self._num_records += 1
                    if self._is_limited:
                        template.tally.add(num_bytes)
            finally:
                if is_outermost:
                    self._is_accounting = False
            if is_outermost and self._file.num_bytes >= self._part_end:
                self._rotate()
        return order, group_order

    def _prepare(self, template: CallTemplate) -> None:
        """Let the next line of a template be the first of this part, which has it in full."""
        record = template.record
        template.positions = self._positions.setdefault(record.group, itertools.count())
        template.tally = self._state.tally(record)
        template.num_bytes = None
        if template.number < 0:
            template.number = next(self._numbers)

    def _write_sizes(
        self,
        template: CallTemplate,
        order: int,
        group_order: int,
        start_ns: int | None,
        num_bytes: tuple[int, int, int],
    ) -> bool:
        """Append a collective of other sizes than the part has in full, or the first."""
        if template.num_bytes is not None:
            numbers = [template.number, order, group_order, start_ns]
            return self._write_line({"repeat": [*numbers, *num_bytes]})
        input_bytes, output_bytes, wire_bytes = num_bytes
        record = replace(
            template.record,
            order=order,
            group_order=group_order,
            start_ns=start_ns,
            input_bytes=input_bytes,
            output_bytes=output_bytes,
            wire_bytes=wire_bytes,
        )
        part = self._part
        is_written = self._write_line({"collective": record, "template": template.number})
        if is_written:
            template.part, template.num_bytes = part, num_bytes
        return is_written

    def write_returned(self, order: int, returned_ns: int, *, is_urgent: bool) -> None:
        """Append when the call of a collective returned: with the next line, or now if urgent."""
        with self._lock:
            if not self._is_blocked:
                self._returns += b'{"returned":[%d,%d]}\n' % (order, returned_ns)
                if is_urgent:
                    self._append(b"")

    def write_begin(self, begin: SpanBegin) -> None:
        """Append the beginning of a phase; its span is written when the phase is left."""
        with self._lock, self._accounting():
            if self._write_line({"begin": begin}) and self._is_limited:
                self._state.begin(begin)

    def write_run(self, run: RunInfo) -> None:
        """Append a run that replaces the header's, for earlier records too."""
        with self._lock, self._accounting():
            self._write_line({"run": run})
            self._state.set_run(run)

    def move(self, path: str | os.PathLike[str], *, force: bool = False) -> None:
        """Rename the file and continue; raises OutputError if that is not possible."""
        with self._lock:
            if self.is_own:
                self._file.move(os.path.abspath(path), force=force)

    def reopen(self) -> None:
        """Continue after `close`: records after an end marker make that marker void."""
        with self._lock:
            if not self._file.is_open and self.failure is None and self.is_own:
                try:
                    self._file.reopen()
                    self._is_blocked = False
                except OSError as error:
                    self._fail(error)

    def close(self, error: str | None = None) -> None:
        """Append the end marker and close the file; closing twice is fine.

        `error` is the exception that ended the trace, in one line.
        """
        with self._lock:
            self._write_line({"end": StreamEnd(num_records=self._num_records, error=error)})
            self._is_blocked = True
            if self.is_own:
                self._file.close()

    def leave(self) -> None:
        """Write nothing in this process, which was forked from the stream's own."""
        self.is_own, self._is_blocked = False, True
        self._lock = threading.RLock()  # a thread of the other process may have it

    # ── Lines ────────────────────────────────────────────────────────────────────────────────

    def _write_line(self, line: object) -> bool:
        try:
            return self._append(encode_json(line) + b"\n")
        except (ValueError, TypeError, OverflowError) as error:
            self._fail(error)
            return False

    def _append(self, line: bytes) -> bool:
        """Write a line; False if the stream is closed or has failed, or is another process's."""
        if self._is_blocked:
            if self._is_rotating:  # this is a signal handler
                self._delayed.append(line)
            return self._is_rotating
        returns, self._returns = self._returns, b""
        try:
            self._file.append(returns + line)
        except OSError as error:
            self._fail(error)
            return False
        return True

    def _fail(self, error: Exception) -> None:
        self._is_blocked = True
        reason = (isinstance(error, OSError) and error.strerror) or str(error)
        self.failure = f"stream '{self.path}' stops after {self._num_records} records: {reason}"

    # ── Parts ────────────────────────────────────────────────────────────────────────────────

    @contextmanager
    def _accounting(self) -> Iterator[None]:
        """Let the state be that of the lines, then begin a new part if the current one is full.

        In between, a signal handler may write lines of its own, and begins no part.
        """
        is_outermost, self._is_accounting = not self._is_accounting, True
        try:
            yield
        finally:
            if is_outermost:
                self._is_accounting = False
        if is_outermost and self._file.num_bytes >= self._part_end:
            self._rotate()

    def _rotate(self) -> None:
        """Replace the file by one with what later lines need and its newer part; begin a part."""
        if self._is_blocked:
            return
        self._is_blocked = self._is_rotating = True
        try:
            start = [encode_json(StreamHeader(run=self._part_run))]
            start += (
                encode_json({_KEYS[type(lasting)]: lasting}) for lasting in self._state.lasting
            )
            end = encode_json({"part": self._state.describe()}) + b"\n"
            self._file.replace(b"\n".join(start) + b"\n", self._part_start, end)
            self._part, self._part_run = object(), self._state.run
            self._part_start = self._file.num_bytes - len(end)
            self._part_end = self._part_start + self._part_bytes
        except (OSError, ValueError, TypeError, OverflowError) as error:
            self._fail(error)
        finally:
            self._is_rotating = False
            self._is_blocked = self.failure is not None
        delayed, self._delayed = self._delayed, []
        for line in delayed:
            self._append(line)


_writers: weakref.WeakSet[StreamWriter] = weakref.WeakSet()


def _leave_all() -> None:
    for writer in _writers:
        writer.leave()


os.register_at_fork(after_in_child=_leave_all)
