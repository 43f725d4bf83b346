"""Bytes from disk, as many as a recording may have, and a sentence for whatever goes wrong."""

from __future__ import annotations

import gzip
import io
import os
import select
import stat
import zlib
from typing import IO

from shardscope.errors import RecordingError

__all__ = ["MAX_BYTES", "read_file", "read_text_file"]

MAX_BYTES = 2 * 1024**3  # of a recording after decompression
# What gzip may unpack: so much in any case, and so many times its own size. Recordings shrink to a
# fortieth; a file made for it, to a thousandth.
_FREE_BYTES = 4 * 1024**2
_MAX_RATIO = 150
_CHUNK_BYTES = 1024**2
_MAX_TEXT_BYTES = 16 * 1024**2  # of a contract or a plan
_MAX_WAIT_MS = 5_000  # for somebody to write to a pipe
_GZIP_MAGIC = b"\x1f\x8b"


def read_file(
    path: str | os.PathLike[str], *, max_bytes: int = MAX_BYTES, start: bytes = b""
) -> bytes:
    """All bytes of a file, decompressed if it is gzip whatever it is called.

    Of a file whose text does not begin with `start`, only what was read to see that.
    """
    name = os.fspath(path)
    try:
        with open(_open_descriptor(path), "rb") as file:
            data = _read_capped(file, name=name, max_bytes=max_bytes, starts=(start, _GZIP_MAGIC))
    except (OSError, ValueError) as error:
        raise RecordingError(_explain_input(name, error)) from error
    if not _is_gzip(data):
        return data
    return _decompress(data, name=name, max_bytes=max_bytes, start=start)


def read_text_file(path: str | os.PathLike[str]) -> str:
    """Read the text of a small file in UTF-8, with its own line ends; raises OSError or ValueError.

    A pipe that nothing writes to and a device that never ends raise OSError.

    Args:
        path: The file.

    Examples:
        >>> read_text_file("shardscope.toml")
    """
    with open(_open_descriptor(path), "rb") as file:
        data = file.read(_MAX_TEXT_BYTES + 1)
    if len(data) > _MAX_TEXT_BYTES:
        raise OSError(f"it has more than {_MAX_TEXT_BYTES} bytes")
    return data.decode("utf-8")


def _open_descriptor(path: str | os.PathLike[str]) -> int:
    """A descriptor to read from; a pipe that nobody writes to would be waited for without end."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    if stat.S_ISFIFO(os.fstat(descriptor).st_mode):
        written = select.poll()
        written.register(descriptor, select.POLLIN)
        if not written.poll(_MAX_WAIT_MS):
            os.close(descriptor)
            raise OSError("it is a named pipe that nothing writes to")
    os.set_blocking(descriptor, True)
    return descriptor


def _is_gzip(data: bytes) -> bool:
    return data.startswith(_GZIP_MAGIC)


def _decompress(data: bytes, *, name: str, max_bytes: int, start: bytes) -> bytes:
    max_bytes = min(max_bytes, _FREE_BYTES + _MAX_RATIO * len(data))
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(data)) as file:
            return _read_capped(file, name=name, max_bytes=max_bytes, starts=(start,))
    except EOFError as error:
        raise RecordingError(
            f"'{name}' is truncated: its gzip data stops after {len(data)} bytes without an end. "
            f"Copy it again, or record again."
        ) from error
    except (OSError, zlib.error) as error:
        raise RecordingError(
            f"'{name}' is damaged: its gzip data cannot be decompressed ({error}). "
            f"Copy it again, or record again."
        ) from error


def _read_capped(
    file: IO[bytes] | gzip.GzipFile, *, name: str, max_bytes: int, starts: tuple[bytes, ...]
) -> bytes:
    # In chunks: a few kilobytes of gzip can hold terabytes, and a device never ends.
    data = io.BytesIO()  # hands its bytes over without a copy
    has_begun = False
    while chunk := file.read(_CHUNK_BYTES):
        if data.tell() + len(chunk) > max_bytes:
            raise RecordingError(
                f"'{name}' holds more than {max_bytes} bytes, the most a recording may have. "
                f"Check that it is a recording; if it is, record fewer steps."
            )
        data.write(chunk)
        text = b"" if has_begun else chunk.lstrip()
        if text and not text.startswith(starts):
            break
        has_begun = has_begun or bool(text)
    return data.getvalue()


def _explain_input(name: str, error: Exception) -> str:
    if isinstance(error, FileNotFoundError):
        return f"there is no file '{name}'. Check the path."
    if isinstance(error, IsADirectoryError):
        return f"'{name}' is a folder, not a recording. Name the recording files inside it."
    if isinstance(error, PermissionError):
        return f"'{name}' may not be read by this user. Check its permissions."
    reason = (isinstance(error, OSError) and error.strerror) or str(error)
    return f"'{name}' cannot be read: {reason}. Check the path and the disk."
