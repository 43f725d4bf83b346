"""Standard output, which may be closed or full, and standard error, without torch's own lines."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, TextIO, cast, final

from shardscope.errors import OutputError

__all__ = ["TorchLines", "explain_stdout", "hold_torch_lines", "silence_stdout", "writing_out"]

# Packages that write to standard error for their callers.
_WRITERS = ("logging", "traceback", "contextlib", "shardscope")


@contextmanager
def writing_out() -> Iterator[None]:
    """Raise OutputError if standard output cannot be written; a closed pipe is no error."""
    if sys.stdout is None:
        raise OutputError(explain_stdout("it is closed"))
    try:
        yield
        sys.stdout.flush()  # here, and not when Python ends
    except BrokenPipeError:
        silence_stdout()
    except OSError as error:
        silence_stdout()
        raise OutputError(explain_stdout(error.strerror or str(error))) from error


def explain_stdout(reason: str) -> str:
    """One sentence on a standard output that cannot be used."""
    return (
        f"standard output cannot be written: {reason}. "
        f"Redirect it to a place with room, or to /dev/null."
    )


def silence_stdout() -> None:
    """Discard what is still buffered, because Python would raise when it flushes at exit."""
    with suppress(OSError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@final
class TorchLines:
    """Standard error that holds back what torch and the `warnings` module write.

    A command that fails explains the failure in one sentence, and a warning or a traceback of
    torch's before it would bury that. If the command succeeds, they are printed after all.
    """

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._held: list[str] = []
        self._is_holding = True

    def write(self, text: str) -> int:
        """Write, or hold back what torch writes."""
        if not self._is_holding:
            # A log handler of torch's has kept this object beyond its command.
            return (self._file if sys.stderr in (None, self) else sys.stderr).write(text)
        if _is_written_by_torch(sys._getframe(1)):
            self._held.append(text)
            return len(text)
        return self._file.write(text)

    def discard(self) -> str:
        """Forget what was held back; a sentence that says how to see it, empty if there is none."""
        num_lines = len("".join(self._held).splitlines())
        self._held.clear()
        if not num_lines:
            return ""
        lines = "1 line" if num_lines == 1 else f"{num_lines:,} lines"
        verb = "is" if num_lines == 1 else "are"
        return (
            f"{lines} of warnings and logs {verb} not shown. "
            "Run again with `shardscope --debug …` to see them."
        )

    def release(self) -> None:
        """Write what was held back, and hold back nothing from now on."""
        self._is_holding = False
        with suppress(OSError, ValueError):
            self._file.write("".join(self._held))
            self._file.flush()
        self._held.clear()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


@contextmanager
def hold_torch_lines() -> Iterator[TorchLines]:
    """Let `sys.stderr` hold back torch's lines; they are printed at the end unless discarded."""
    stderr = sys.stderr
    lines = TorchLines(stderr)
    if stderr is not None:
        sys.stderr = cast(TextIO, lines)
    try:
        yield lines
    finally:
        if stderr is not None:
            sys.stderr = stderr
            lines.release()


def _is_written_by_torch(frame: FrameType | None) -> bool:
    while frame is not None:
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if package in ("torch", "warnings"):
            return True
        if package not in _WRITERS:
            return False
        frame = frame.f_back
    return False
