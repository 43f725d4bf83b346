"""Bytes to and from disk: whole files or none, and a sentence for whatever goes wrong."""

from __future__ import annotations

import gzip
import io
import os
import stat
import zlib
from pathlib import Path
from typing import IO

from shardscope.errors import OutputError, RecordingError

__all__ = ["MAX_BYTES", "check_output", "read_file", "write_file"]

MAX_BYTES = 2 * 1024**3  # of a recording after decompression
_CHUNK_BYTES = 1024**2
_GZIP_MAGIC = b"\x1f\x8b"


def write_file(data: bytes, path: str | os.PathLike[str], *, force: bool = False) -> Path:
    """Write `data` so that `path` holds either all of it or what it held before."""
    check_output(path, force=force)
    # Follow symlinks: os.replace would put the file where the link is.
    target = Path(os.path.realpath(path))
    try:
        if target.exists() and not target.is_file():
            target.write_bytes(data)  # a pipe or a device; replacing it would destroy it
        else:
            _replace(target, data)
    except OSError as error:
        raise OutputError(_explain_output(path, error)) from error
    return Path(path)


def check_output(path: str | os.PathLike[str], *, force: bool = False) -> None:
    """Raise OutputError if `path` plainly cannot be written, before work is spent on it."""
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        _check_folder(Path(path))
        return
    except (OSError, ValueError) as error:
        raise OutputError(_explain_output(path, error)) from error
    if stat.S_ISDIR(mode):
        raise OutputError(
            f"cannot write '{os.fspath(path)}': it is a folder. Name a file inside it."
        )
    if stat.S_ISREG(mode) and not force:
        raise OutputError(
            f"'{os.fspath(path)}' already exists. "
            f"Choose another name, or overwrite it with --force (force=True in Python)."
        )


def _check_folder(path: Path) -> None:
    if not path.parent.is_dir():
        raise OutputError(
            f"cannot write '{path}': there is no folder '{path.parent}'. Create the folder first."
        )


def _replace(target: Path, data: bytes) -> None:
    temporary = target.with_name(f".{target.name[:100]}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(data)
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)


def _explain_output(path: str | os.PathLike[str], error: Exception) -> str:
    reason = (isinstance(error, OSError) and error.strerror) or str(error)
    return (
        f"cannot write '{os.fspath(path)}': {reason}. "
        f"Choose a place that can be written and has room."
    )


def read_file(path: str | os.PathLike[str], *, max_bytes: int = MAX_BYTES) -> bytes:
    """All bytes of a file, decompressed if it is gzip whatever it is called."""
    name = os.fspath(path)
    try:
        with open(path, "rb") as file:
            data = _read_capped(file, name=name, max_bytes=max_bytes)
    except (OSError, ValueError) as error:
        raise RecordingError(_explain_input(name, error)) from error
    return _decompress(data, name=name, max_bytes=max_bytes) if _is_gzip(data) else data


def _is_gzip(data: bytes) -> bool:
    return data.startswith(_GZIP_MAGIC)


def _decompress(data: bytes, *, name: str, max_bytes: int) -> bytes:
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(data)) as file:
            return _read_capped(file, name=name, max_bytes=max_bytes)
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


def _read_capped(file: IO[bytes] | gzip.GzipFile, *, name: str, max_bytes: int) -> bytes:
    # In chunks: a few kilobytes of gzip can hold terabytes, and a device never ends.
    chunks: list[bytes] = []
    num_bytes = 0
    while chunk := file.read(_CHUNK_BYTES):
        num_bytes += len(chunk)
        if num_bytes > max_bytes:
            raise RecordingError(
                f"'{name}' holds more than {max_bytes} bytes, the most a recording may have. "
                f"Check that it is a recording; if it is, record fewer steps."
            )
        chunks.append(chunk)
    return b"".join(chunks)


def _explain_input(name: str, error: Exception) -> str:
    if isinstance(error, FileNotFoundError):
        return f"there is no file '{name}'. Check the path."
    if isinstance(error, IsADirectoryError):
        return f"'{name}' is a folder, not a recording. Name the recording files inside it."
    if isinstance(error, PermissionError):
        return f"'{name}' may not be read by this user. Check its permissions."
    reason = (isinstance(error, OSError) and error.strerror) or str(error)
    return f"'{name}' cannot be read: {reason}. Check the path and the disk."
