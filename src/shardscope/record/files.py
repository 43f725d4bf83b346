"""Reads and writes files: completely or not at all, with errors that are one sentence."""

from __future__ import annotations

import errno
import gzip
import io
import os
import secrets
import select
import stat
import zlib
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import IO

from shardscope.errors import OutputError, RecordingError

MAX_BYTES = 2 * 1024**3  # of a recording after decompression
# The limit for unpacked gzip data: a fixed size plus a multiple of its own size. Recordings shrink
# to a fortieth, very repetitive ones to a two-hundredth; a hostile file, to a thousandth.
_FREE_BYTES = 16 * 1024**2
_MAX_RATIO = 150
_CHUNK_BYTES = 1024**2
_MAX_TEXT_BYTES = 16 * 1024**2  # of a contract or a plan
_MAX_WAIT_MS = 5_000  # for data in a pipe
_TOO_LARGE = (
    "the most a recording may have. Check that it is a recording; if it is, record fewer steps."
)
_GZIP_MAGIC = b"\x1f\x8b"


def read_file(
    path: str | os.PathLike[str], *, max_bytes: int = MAX_BYTES, start: bytes = b""
) -> bytes:
    """All bytes of a file, decompressed if it is gzip, whatever its name.

    If the text does not begin with `start`, only the first bytes are read and returned.
    """
    name = os.fspath(path)
    try:
        with open(_open_descriptor(path), "rb") as file:
            data = _read_capped(file, name=name, max_bytes=max_bytes, starts=(start, _GZIP_MAGIC))
    except (OSError, ValueError) as error:
        raise RecordingError(_explain_input(name, error)) from error
    if not _is_gzip(data):
        return data
    return decompress(data, name=name, max_bytes=max_bytes, start=start)


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
    """A descriptor to read from; raises for a pipe without a writer, which would block forever."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    if stat.S_ISFIFO(os.fstat(descriptor).st_mode):
        poller = select.poll()
        poller.register(descriptor, select.POLLIN)
        if not poller.poll(_MAX_WAIT_MS):
            os.close(descriptor)
            raise OSError("it is a named pipe that nothing writes to")
    os.set_blocking(descriptor, True)
    return descriptor


def _is_gzip(data: bytes) -> bool:
    return data.startswith(_GZIP_MAGIC)


def decompress(data: bytes, *, name: str, max_bytes: int, start: bytes) -> bytes:
    """Unpack gzip data up to a limit; raises RecordingError if it is damaged or unpacks to more."""
    limit = min(max_bytes, _FREE_BYTES + _MAX_RATIO * len(data))
    reason = _TOO_LARGE
    if limit < max_bytes:
        reason = (
            f"which is over {_MAX_RATIO} times its compressed size. Check that it is a recording; "
            "if it is, decompress it with gunzip, and name that file."
        )
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(data)) as file:
            return _read_capped(file, name=name, max_bytes=limit, starts=(start,), reason=reason)
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
    file: IO[bytes] | gzip.GzipFile,
    *,
    name: str,
    max_bytes: int,
    starts: tuple[bytes, ...],
    reason: str = _TOO_LARGE,
) -> bytes:
    # In chunks: a few kilobytes of gzip can hold terabytes, and a device never ends.
    data = io.BytesIO()  # hands its bytes over without a copy
    has_begun = False
    while chunk := file.read(_CHUNK_BYTES):
        if data.tell() + len(chunk) > max_bytes:
            raise RecordingError(f"'{name}' holds more than {max_bytes} bytes, {reason}")
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


# Pipes that `check_output` has opened: closing one would signal the end of data to its reader.
_pipes: dict[str, int] = {}


def write_file(
    data: bytes | Iterable[bytes], path: str | os.PathLike[str], *, force: bool = False
) -> Path:
    """Write a file completely or not at all.

    Compressed if the name ends in `.gz`. Without `force` a file that exists is kept, even if
    another process creates it in the meantime.

    Args:
        data: The bytes, or chunks of them.
        path: The file.
        force: Overwrite a file that exists.

    Examples:
        >>> write_file(encode(recording), "step.json.gz")
    """
    check_output(path, force=force)
    chunks = (data,) if isinstance(data, bytes) else data
    is_compressed = os.fspath(path).lower().endswith(".gz")
    try:
        if os.path.exists(path) and not os.path.isfile(path):
            # A pipe or a device; replacing it would destroy it.
            descriptor = open_special(path)
            os.set_blocking(descriptor, True)
            with open(descriptor, "wb") as file:
                _write_chunks(file, chunks, is_compressed=is_compressed)
        else:
            # Follow symlinks: os.replace would put the file where the link is.
            target = Path(os.path.realpath(path))
            _write_beside(target, chunks, is_compressed=is_compressed, force=force)
    except FileExistsError as error:
        raise OutputError(explain_existing(path)) from error
    except OSError as error:
        raise OutputError(_explain_output(path, error)) from error
    return Path(path)


def move_file(
    source: str | os.PathLike[str], path: str | os.PathLike[str], *, force: bool = False
) -> None:
    """Rename a file; without `force` an existing file is an error."""
    check_output(path, force=force)
    try:
        if force:
            os.replace(source, path)
        else:
            _put_in_place(Path(source), Path(path))
            Path(source).unlink(missing_ok=True)
    except FileExistsError as error:
        raise OutputError(explain_existing(path)) from error
    except OSError as error:
        raise OutputError(_explain_output(path, error)) from error


def check_output(path: str | os.PathLike[str], *, force: bool = False) -> None:
    """Raise OutputError if a file cannot be written, before work is spent on it.

    Args:
        path: The file.
        force: Whether it may exist.

    Examples:
        >>> check_output("step.json.gz")
    """
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        _check_folder(path)
        return
    except (OSError, ValueError) as error:
        raise OutputError(_explain_output(path, error)) from error
    if stat.S_ISDIR(mode):
        raise OutputError(
            f"cannot write '{os.fspath(path)}': it is a folder. Name a file inside it."
        )
    if stat.S_ISSOCK(mode) or stat.S_ISBLK(mode):
        kind = "a socket" if stat.S_ISSOCK(mode) else "a block device"
        raise OutputError(f"cannot write '{os.fspath(path)}': it is {kind}. Name a file.")
    if stat.S_ISFIFO(mode):
        _open_pipe(path)
    if stat.S_ISREG(mode):
        if not force:
            raise OutputError(explain_existing(path))
        _check_folder(path)  # the new file is created beside the old one


def open_special(path: str | os.PathLike[str]) -> int:
    """A descriptor of a device, or of a pipe that `check_output` has opened.

    It does not block: a write that would block is an error.
    """
    descriptor = _pipes.pop(os.path.realpath(path), None)
    if descriptor is not None:
        return descriptor
    return os.open(path, os.O_WRONLY | os.O_NONBLOCK)


def _open_pipe(path: str | os.PathLike[str]) -> None:
    """Open a pipe, or raise OutputError if it has no reader: writing would block forever."""
    name = os.path.realpath(path)
    if name in _pipes:
        return
    try:
        _pipes[name] = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
    except OSError as error:
        if error.errno != errno.ENXIO:
            raise OutputError(_explain_output(path, error)) from error
        raise OutputError(
            f"cannot write '{os.fspath(path)}': it is a named pipe that nothing reads. Start its "
            "reader first, or name a file."
        ) from error


def explain_existing(path: str | os.PathLike[str]) -> str:
    """A sentence on an output file that already exists."""
    return (
        f"'{os.fspath(path)}' already exists. "
        f"Choose another name, or overwrite it with --force (force=True in Python)."
    )


def _check_folder(path: str | os.PathLike[str]) -> None:
    folder = Path(os.path.realpath(path) if os.path.islink(path) else path).parent
    if not folder.is_dir():
        raise OutputError(
            f"cannot write '{os.fspath(path)}': there is no folder '{folder}'. "
            f"Create the folder first."
        )
    if not os.access(folder, os.W_OK | os.X_OK):
        raise OutputError(
            f"cannot write '{os.fspath(path)}': this user may not write in the folder '{folder}'. "
            f"Choose another folder, or change its permissions."
        )


def _write_beside(
    target: Path, chunks: Iterable[bytes], *, is_compressed: bool, force: bool
) -> None:
    """Write a temporary file with a unique name in the same folder, then rename it."""
    temporary = target.with_name(f".{target.name[:40]}.{secrets.token_hex(8)}.tmp")
    try:
        with open(temporary, "xb") as file:
            _write_chunks(file, chunks, is_compressed=is_compressed)
        if force:
            with suppress(FileNotFoundError):
                temporary.chmod(stat.S_IMODE(target.stat().st_mode))
            os.replace(temporary, target)
        else:
            _put_in_place(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)


def _put_in_place(temporary: Path, target: Path) -> None:
    """Rename the file, or raise FileExistsError if the target exists by then."""
    try:
        os.link(temporary, target)
    except FileExistsError:
        raise
    except OSError:
        # Not every file system has hard links: reserve the name first, then replace it.
        os.close(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
        try:
            os.replace(temporary, target)
        except OSError:
            target.unlink(missing_ok=True)
            raise


def _write_chunks(file: IO[bytes], chunks: Iterable[bytes], *, is_compressed: bool) -> None:
    if not is_compressed:
        file.writelines(chunks)
        return
    # No name and no time in the header, so that the same data gives the same bytes.
    with gzip.GzipFile(filename="", mode="wb", fileobj=file, mtime=0) as packed:
        packed.writelines(chunks)


def _explain_output(path: str | os.PathLike[str], error: Exception) -> str:
    reason = (isinstance(error, OSError) and error.strerror) or str(error)
    return (
        f"cannot write '{os.fspath(path)}': {reason}. Choose a writable location with free space."
    )


def name_for_rank(path: str | Path, rank: int) -> Path:
    """The path, in which `{rank}` becomes the rank."""
    return Path(str(path).replace("{rank}", str(rank)))
