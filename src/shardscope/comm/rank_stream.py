"""The stream of one trace: on disk from the start, under its rank's name once that is known."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable
from pathlib import Path
from typing import final

from shardscope.errors import OutputError
from shardscope.record import RunInfo, SpanBegin, StreamWriter
from shardscope.record.stream import StreamRecord

__all__ = ["RankStream", "name_for_rank"]


@final
class RankStream:
    """Writes to the path, in which `{rank}` is "pid" and this process's number at first.

    Only a world tells the rank, and it may never begin: what happens until then is on disk too.
    Processes that are to be ranks of one world must not take each other's names meanwhile.
    """

    def __init__(self, path: str | Path, run: RunInfo, *, force: bool, is_rank_known: bool) -> None:
        self._path = os.path.abspath(path)  # the run may change its directory
        self._force = force
        self._run = run
        is_named = is_rank_known or "{rank}" not in self._path
        self._writer = self._open() if is_named else self._open_unnamed()

    @property
    def failure(self) -> str | None:
        """Why nothing more is written, if so."""
        return self._writer.failure

    def write(self, record: StreamRecord) -> None:
        """Append one record."""
        self._writer.write(record)

    def write_begin(self, begin: SpanBegin) -> None:
        """Append that a span has begun."""
        self._writer.write_begin(begin)

    def become(self, run: RunInfo, early: Iterable[StreamRecord]) -> None:
        """The run is this one, also for what was written; OutputError if its name is taken.

        `early` is what a process that was forked off the traced one writes anew.
        """
        if not self._writer.is_own:
            self._open_forked(run, early)
        self.describe_run(run)
        self.take_name()

    def describe_run(self, run: RunInfo) -> None:
        """The run is this one, of the same rank, and more is known of it than before."""
        if run != self._run:
            self._writer.write_run(run)
        self._run = run

    def take_name(self) -> None:
        """Name the file for the rank; OutputError if that cannot be, and it is as it was."""
        path = self._named()
        if not self._writer.is_own or path == self._writer.path:
            return
        try:
            self._writer.move(path, force=self._force)
        except OutputError as error:
            raise OutputError(f"{error} The stream stays in '{self._writer.path}'.") from error

    def reopen(self) -> None:
        """Go on after `close`."""
        self._writer.reopen()

    def close(self, error: str | None = None) -> None:
        """The trace was left, with `error` if an exception ended it."""
        self._writer.close(error)

    def _named(self) -> str:
        return str(name_for_rank(self._path, self._run.ranks[0].first))

    def _open(self) -> StreamWriter:
        return StreamWriter(self._named(), self._run, force=self._force)

    def _open_unnamed(self) -> StreamWriter:
        for number in itertools.count():  # processes of other machines may have our number
            process = f"pid{os.getpid()}" + (f"-{number}" if number else "")
            path = self._place_unnamed(process)
            try:
                return StreamWriter(path, self._run)
            except OutputError:
                if not os.path.isfile(path):
                    raise
        raise AssertionError("numbers do not end")

    def _place_unnamed(self, process: str) -> str:
        folder, name = os.path.split(self._path)
        if "{rank}" in folder:  # there is none for processes
            folder, name = os.path.dirname(folder[: folder.index("{rank}")]), f"{{rank}}-{name}"
        return os.path.join(folder, name.replace("{rank}", process))

    def _open_forked(self, run: RunInfo, early: Iterable[StreamRecord]) -> None:
        """The file is our parent's, and goes on to be."""
        parents, self._run = self._writer.path, run
        if self._named() == parents:
            raise OutputError(
                f"'{parents}' is the stream of the process that this one was forked from. "
                "Put {rank} into the name, so that each rank has its own."
            )
        self._writer = self._open()
        for record in early:
            self._writer.write(record)


def name_for_rank(path: str | Path, rank: int) -> Path:
    """The path, in which `{rank}` becomes the rank."""
    return Path(str(path).replace("{rank}", str(rank)))
