"""A file to which lines are appended during a run, which may close all descriptors or fork.

Lines are written, not put into a mapping of the file: a mapping would end the process with SIGBUS
when another program truncates the file, or when its disk is full or fails.
"""

from __future__ import annotations

import errno
import itertools
import os
import select
import stat
from collections.abc import Iterator
from contextlib import suppress
from fcntl import F_GETSIG, F_SETSIG, fcntl
from typing import IO, final

from shardscope.errors import OutputError
from shardscope.record.files import check_output, explain_existing, move_file, open_special

_MAX_WAIT_MS = 1_000  # for the reader of a pipe to make room
_CHUNK_BYTES = 1024**2
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_NONBLOCK | os.O_NOFOLLOW
# Signals that the system would send for a descriptor that is asynchronous, which ours are not: a
# number that is stored with an open file, and by which it is recognised faster than by `fstat`.
_marks = itertools.cycle(range(36, 64))


@final
class AppendFile:
    """Appends data to a file, pipe or device, in one unbuffered write each time.

    If the run closes the descriptor, as programs do that close all of them, the file is opened
    again, and the file that has the number by then is left alone. The constructor raises
    OutputError, other methods OSError.
    """

    def __init__(self, path: str, *, force: bool) -> None:
        self.path = path
        self.num_bytes = 0  # that were written
        self._descriptor: int | None = _open(path, force=force)
        self._identity = _identify(self._descriptor)
        self._mark = _set_mark(self._descriptor)

    @property
    def is_open(self) -> bool:
        """Whether data can be appended."""
        return self._descriptor is not None

    @property
    def is_regular(self) -> bool:
        """Whether it is a file, and not a pipe or a device."""
        return self._descriptor is not None and stat.S_ISREG(os.fstat(self._descriptor).st_mode)

    def append(self, data: bytes) -> None:
        """Append data; raises BlockingIOError if a pipe stays full, as the run must not wait."""
        try:
            is_ours = fcntl(self._descriptor or 0, F_GETSIG) == self._mark
        except OSError:  # it is closed
            is_ours = False
        if not is_ours and not self._has_descriptor():
            self.reopen()
        assert self._descriptor is not None
        try:
            num_written = os.write(self._descriptor, data)
        except BlockingIOError:
            num_written = 0
        if num_written < len(data):
            _write_all(self._descriptor, data[num_written:])
        self.num_bytes += len(data)

    def move(self, path: str, *, force: bool) -> None:
        """Rename the file and continue; raises OutputError if that is not possible."""
        move_file(self.path, path, force=force)
        self.path = path

    def reopen(self) -> None:
        """Open the file again to append to it; fails if another file has its name now."""
        self._descriptor = None
        descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK)
        if _identify(descriptor) != self._identity:
            os.close(descriptor)
            raise _is_another_file()
        self._descriptor, self._mark = descriptor, _set_mark(descriptor)

    def close(self) -> None:
        """Close the file; closing twice is fine."""
        if self._descriptor is not None and self._has_descriptor():
            os.close(self._descriptor)
        self._descriptor = None

    def replace(self, start: bytes, first: int, end: bytes) -> None:
        """Let a file take its place that has `start`, what it has from the position `first`, `end`.

        If another process has truncated the file or written to it, what it has is left out.
        """
        path = os.path.realpath(self.path)
        # A name that is used again: a process that is killed leaves one such file.
        folder, name = os.path.split(path)
        temporary = os.path.join(folder, f".{name[:200]}.next")
        with suppress(FileNotFoundError):
            os.unlink(temporary)
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as old:
            status = os.fstat(old.fileno())
            if (status.st_dev, status.st_ino) != self._identity:
                raise _is_another_file()
            is_intact = status.st_size == self.num_bytes
            kept = _read_from(old, first) if is_intact else iter(())
            descriptor = os.open(temporary, _NEW_FILE, stat.S_IMODE(status.st_mode))
            try:
                os.fchmod(descriptor, stat.S_IMODE(status.st_mode))
                num_bytes = 0
                for data in itertools.chain([start], kept, [end]):
                    _write_all(descriptor, data)
                    num_bytes += len(data)
                os.replace(temporary, path)
            except BaseException:
                os.close(descriptor)
                with suppress(OSError):
                    os.unlink(temporary)
                raise
        self.close()
        self._descriptor, self.num_bytes = descriptor, num_bytes
        self._identity, self._mark = _identify(descriptor), _set_mark(descriptor)

    def _has_descriptor(self) -> bool:
        try:
            return self._descriptor is not None and _identify(self._descriptor) == self._identity
        except OSError:
            return False


def _set_mark(descriptor: int) -> int:
    """Mark an open file, and return the mark; 0 if the system cannot."""
    mark = next(_marks)
    try:
        fcntl(descriptor, F_SETSIG, mark)
        return mark if fcntl(descriptor, F_GETSIG) == mark else _NO_MARK
    except OSError:
        return _NO_MARK


_NO_MARK = -1  # which no file has


def _identify(descriptor: int) -> tuple[int, int]:
    """The device and inode of a file, which identify it."""
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino


def _is_another_file() -> OSError:
    return OSError(errno.ESTALE, "another file now has its name")


def _read_from(file: IO[bytes], position: int) -> Iterator[bytes]:
    """What a file has from a position on."""
    file.seek(position)
    while data := file.read(_CHUNK_BYTES):
        yield data


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
        raise OutputError(explain_unwritable(path, error.strerror or str(error))) from error


def explain_unwritable(path: str, reason: str) -> str:
    """A sentence on a stream that cannot be written."""
    return (
        f"cannot write the stream '{path}': {reason}. Choose a writable location with free space."
    )


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
