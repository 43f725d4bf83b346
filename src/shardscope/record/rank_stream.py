"""The stream of a rank that may not be known yet, as its name depends on the rank."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable
from pathlib import Path
from typing import final

from shardscope.errors import OutputError, RecordingError
from shardscope.record.files import name_for_rank, read_file
from shardscope.record.profile_records import SpanBegin
from shardscope.record.recording import Recording, RunInfo
from shardscope.record.replay import read_stream
from shardscope.record.stream import StreamWriter
from shardscope.record.stream_lines import StreamRecord


@final
class RankStream:
    """Writes to a path in which `{rank}` is "pid" and the process id until the rank is known.

    The rank is known once a world is initialized, which may never happen; events before that are
    written too. Until then, the process id keeps the files of different ranks apart.
    """

    def __init__(
        self,
        path: str | Path,
        run: RunInfo,
        *,
        force: bool,
        is_rank_known: bool,
        max_bytes: int | None = None,
    ) -> None:
        self._path = os.path.abspath(path)  # the run may change the working directory
        self._force = force
        self._max_bytes = max_bytes
        self._run = run
        is_named = is_rank_known or "{rank}" not in self._path
        self.writer = self._open() if is_named else self._open_unnamed()

    @property
    def failure(self) -> str | None:
        """Why writing failed; None while it works."""
        return self.writer.failure

    def write(self, record: StreamRecord) -> None:
        """Append one record."""
        self.writer.write(record)

    def write_begin(self, begin: SpanBegin) -> None:
        """Append that a span has begun."""
        self.writer.write_begin(begin)

    def set_run(self, run: RunInfo, early: Iterable[StreamRecord]) -> None:
        """Set the run, also for what was written already; OutputError if the file name is in use.

        `early` are the records that a process forked from the traced one writes again.
        """
        if not self.writer.is_own:
            self._open_forked(run, early)
        self.describe_run(run)
        self.rename()

    def describe_run(self, run: RunInfo) -> None:
        """Update the run, whose rank is unchanged."""
        if run != self._run:
            self.writer.write_run(run)
        self._run = run

    def rename(self) -> None:
        """Rename the file for the rank; on OutputError it keeps its name."""
        path = self._named()
        if not self.writer.is_own or path == self.writer.path:
            return
        try:
            self.writer.move(path, force=self._force)
        except OutputError as error:
            raise OutputError(f"{error} The stream stays in '{self.writer.path}'.") from error

    def reopen(self) -> None:
        """Continue after `close`."""
        self.writer.reopen()

    def close(self, error: str | None = None) -> None:
        """End the stream, with the `error` that ended the trace, if any."""
        self.writer.close(error)

    def read_back(self) -> Recording:
        """What the stream has kept so far; raises RecordingError if it is not in a file."""
        path = self.writer.path
        if not os.path.isfile(path):  # reading a pipe would take what its reader waits for
            raise RecordingError(f"'{path}' is not a file")
        return read_stream(read_file(path), path)

    def _named(self) -> str:
        return str(name_for_rank(self._path, self._run.ranks[0].first))

    def _open(self) -> StreamWriter:
        return StreamWriter(self._named(), self._run, force=self._force, max_bytes=self._max_bytes)

    def _open_unnamed(self) -> StreamWriter:
        for number in itertools.count():  # processes on other machines may have the same id
            process = f"pid{os.getpid()}" + (f"-{number}" if number else "")
            path = self._unnamed_path(process)
            try:
                return StreamWriter(path, self._run, max_bytes=self._max_bytes)
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
        parents, self._run = self.writer.path, run
        if self._named() == parents:
            raise OutputError(
                f"'{parents}' is the stream of the process that this one was forked from. "
                "Put {rank} into the name, so that each rank has its own."
            )
        self.writer = self._open()
        for record in early:
            self.writer.write(record)
