"""Bytes to disk: complete files or none, and a sentence for whatever goes wrong."""

from __future__ import annotations

import errno
import gzip
import os
import secrets
import stat
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import IO

from shardscope.errors import OutputError

__all__ = ["check_output", "explain_existing", "move_file", "open_special", "write_file"]

# Pipes that a check has opened: closing one again would tell its reader that there is no more.
_pipes: dict[str, int] = {}


def write_file(
    data: bytes | Iterable[bytes], path: str | os.PathLike[str], *, force: bool = False
) -> Path:
    """Write a file completely or not at all.

    Compressed if the name ends in `.gz`. Without `force` a file that exists is kept, even if
    another process creates it in the meantime.

    Args:
        data: The bytes, or pieces of them.
        path: The file.
        force: Overwrite a file that exists.

    Examples:
        >>> write_file(encode(recording), "step.json.gz")
    """
    check_output(path, force=force)
    pieces = (data,) if isinstance(data, bytes) else data
    is_compressed = os.fspath(path).lower().endswith(".gz")
    try:
        if os.path.exists(path) and not os.path.isfile(path):
            # A pipe or a device; replacing it would destroy it.
            descriptor = open_special(path)
            os.set_blocking(descriptor, True)
            with open(descriptor, "wb") as file:
                _write_pieces(file, pieces, is_compressed=is_compressed)
        else:
            # Follow symlinks: os.replace would put the file where the link is.
            target = Path(os.path.realpath(path))
            _write_beside(target, pieces, is_compressed=is_compressed, force=force)
    except FileExistsError as error:
        raise OutputError(explain_existing(path)) from error
    except OSError as error:
        raise OutputError(_explain_output(path, error)) from error
    return Path(path)


def move_file(
    source: str | os.PathLike[str], path: str | os.PathLike[str], *, force: bool = False
) -> None:
    """Give a file another name; without `force` a file that has it stays."""
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
        _check_folder(path)  # the new file is made beside the old one


def open_special(path: str | os.PathLike[str]) -> int:
    """A descriptor of a device, or of a pipe that `check_output` found a reader of.

    It does not block: a write that would is an error.
    """
    descriptor = _pipes.pop(os.path.realpath(path), None)
    if descriptor is not None:
        return descriptor
    return os.open(path, os.O_WRONLY | os.O_NONBLOCK)


def _open_pipe(path: str | os.PathLike[str]) -> None:
    """Take hold of a pipe, or raise OutputError if nobody reads it: writing would never return."""
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
    """One sentence on a file that is in the way."""
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
    target: Path, pieces: Iterable[bytes], *, is_compressed: bool, force: bool
) -> None:
    """Write a file of our own, which no other thread or process knows, then give it its name."""
    temporary = target.with_name(f".{target.name[:40]}.{secrets.token_hex(8)}.tmp")
    try:
        with open(temporary, "xb") as file:
            _write_pieces(file, pieces, is_compressed=is_compressed)
        if force:
            with suppress(FileNotFoundError):
                temporary.chmod(stat.S_IMODE(target.stat().st_mode))
            os.replace(temporary, target)
        else:
            _put_in_place(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)


def _put_in_place(temporary: Path, target: Path) -> None:
    """Give the file its name, or raise FileExistsError if there is one by then."""
    try:
        os.link(temporary, target)
    except FileExistsError:
        raise
    except OSError:
        # Not every file system has hard links: take the name first, then put the file there.
        os.close(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
        try:
            os.replace(temporary, target)
        except OSError:
            target.unlink(missing_ok=True)
            raise


def _write_pieces(file: IO[bytes], pieces: Iterable[bytes], *, is_compressed: bool) -> None:
    if not is_compressed:
        file.writelines(pieces)
        return
    # No name and no time in the header, so that the same data gives the same bytes.
    with gzip.GzipFile(filename="", mode="wb", fileobj=file, mtime=0) as packed:
        packed.writelines(pieces)


def _explain_output(path: str | os.PathLike[str], error: Exception) -> str:
    reason = (isinstance(error, OSError) and error.strerror) or str(error)
    return (
        f"cannot write '{os.fspath(path)}': {reason}. "
        f"Choose a place that can be written and has room."
    )
