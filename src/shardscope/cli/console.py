"""Prints to the terminal, standard output and standard error, and computes exit codes.

Lines that torch writes to standard error are held back until the command ends. Of the processes
that a launcher such as torchrun started, the first prints (`is_first`).
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from io import TextIOWrapper
from threading import Timer
from types import FrameType
from typing import Any, TextIO, cast, final

import click
from rich.console import Console, RenderableType
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.segment import Segments

from shardscope.cli.json_result import add_message, current_json
from shardscope.errors import OutputError
from shardscope.record import Recording, Severity
from shardscope.record.text import GuardedFile, sanitize_text

# What torch.distributed needs to meet the others; RANK alone may be left over from anything.
_LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
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
        f"Redirect it to a disk with free space, or to /dev/null."
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
        self._buffered: list[str] = []
        self._is_buffering = True

    def write(self, text: str) -> int:
        """Write text, or buffer it if torch writes it."""
        if not self._is_buffering:
            # A log handler of torch still refers to this object after its command.
            return (self._file if sys.stderr in (None, self) else sys.stderr).write(text)
        if _is_written_by_torch(sys._getframe(1)):
            self._buffered.append(text)
            return len(text)
        return self._file.write(text)

    def discard(self) -> str:
        """Discard buffered lines; returns a sentence on how to see them, or an empty string."""
        num_lines = len("".join(self._buffered).splitlines())
        self._buffered.clear()
        if not num_lines:
            return ""
        lines = "1 line" if num_lines == 1 else f"{num_lines:,} lines"
        verb = "is" if num_lines == 1 else "are"
        return (
            f"{lines} of warnings and logs {verb} not shown. "
            "Run again with `shardscope --debug …` to see them."
        )

    def release(self) -> None:
        """Write the buffered lines, and stop buffering."""
        self._is_buffering = False
        with suppress(OSError, ValueError):
            self._file.write("".join(self._buffered))
            self._file.flush()
        self._buffered.clear()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


@contextmanager
def buffer_torch_lines() -> Iterator[TorchLines]:
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


_PATIENCE_S = 0.5  # until progress is worth showing


@final
class _Console(Console):
    """A console that ignores a closed pipe (`| head`) instead of ending the command."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        silence_stdout()


def print_out(*things: RenderableType) -> None:
    """Print to standard output: colours on a terminal unless NO_COLOR, plain otherwise."""
    if result := current_json():
        result.add_printed(*things)
        return
    with writing_out():
        console = _open_console()
        with show_progress("laying out"):
            rendered = [Segments(list(console.render(thing))) for thing in things]
        for segments in rendered:
            console.print(segments)


def print_line(text: str = "") -> None:
    """Print a line of any length, with untrusted text sanitized."""
    if result := current_json():
        result.add_printed(sanitize_text(text))
        return
    with writing_out():
        _open_console().print(sanitize_text(text), soft_wrap=True)


def print_next(command: str, label: str = "next") -> None:
    """Print a command that is useful now: `next: shardscope report run.json.gz`."""
    if result := current_json():
        result.add_next(command)
        return
    print_line(f"{label}: {command}")


def print_error(sentence: str) -> None:
    """Print to standard error why the command fails."""
    print_note(sentence, is_error=True)


def print_note(sentence: str, *, is_error: bool = False) -> None:
    """Print a sentence to standard error, with untrusted text sanitized."""
    add_message(sentence, is_error=is_error)
    click.echo(f"shardscope: {sanitize_text(sentence)}", err=True)


def print_traceback(error: BaseException) -> None:
    """Print an exception's traceback to standard error, for `--debug`."""
    for line in "".join(traceback.format_exception(error)).splitlines():
        click.echo(sanitize_text(line), err=True)


def write_out(chunks: Iterable[bytes]) -> None:
    """Send bytes to standard output."""
    with writing_out():
        for chunk in chunks:
            sys.stdout.buffer.write(chunk)


def _open_console() -> Console:
    if isinstance(sys.stdout, TextIOWrapper):
        # × and … are not in every encoding; a question mark is better than a traceback.
        sys.stdout.reconfigure(errors="replace")
    file = cast(TextIO, GuardedFile(sys.stdout))
    return _Console(file=file, highlight=False, markup=False, emoji=False)


@contextmanager
def show_progress(title: str, *, is_shown: bool = True) -> Iterator[Callable[[str], None]]:
    """Show a progress line with elapsed time on standard error; yields a function to update it.

    On a terminal only, or as lines with `--json`, and only if the work takes a while.
    """
    if current_json() is not None and is_shown:
        yield _ProgressLines(title)
        return
    console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    # What the user's program prints belongs on standard output, wherever that goes.
    is_shared = sys.stdout is not None and sys.stdout.isatty()
    progress = Progress(*columns, console=console, transient=True, redirect_stdout=is_shared)
    task = progress.add_task(sanitize_text(title))
    timer = Timer(_PATIENCE_S, progress.start)
    timer.daemon = True
    if is_shown and console.is_terminal:
        timer.start()
    try:
        yield lambda doing: progress.update(task, description=sanitize_text(f"{title}: {doing}"))
    finally:
        timer.cancel()
        if timer.is_alive():
            timer.join()
        if progress.live.is_started:
            progress.stop()


@final
class _ProgressLines:
    """Writes progress to standard error as lines, at most one in `_PATIENCE_S`."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._time = time.monotonic()

    def __call__(self, doing: str) -> None:
        if time.monotonic() - self._time >= _PATIENCE_S:
            self._time = time.monotonic()
            click.echo(sanitize_text(f"{self._title}: {doing}"), err=True)


def exit_code(recording: Recording, *, is_strict: bool = False) -> int:
    """1 for a finding that is a warning or an error, or, if strict, for a gap; else 0."""
    has_finding = any(finding.severity is not Severity.INFO for finding in recording.findings)
    return int(has_finding or (is_strict and bool(recording.gaps)))


def is_launched() -> bool:
    """Whether torchrun, or something like it, started this process as one of several."""
    numbers = (os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE"))
    return all(os.environ.get(name) for name in _LAUNCHER_VARIABLES) and all(
        map(str.isdecimal, numbers)
    )


def launched_rank() -> int:
    """This process's rank, as it was launched."""
    return int(os.environ["RANK"])


def num_launched() -> int:
    """How many processes were launched."""
    return int(os.environ["WORLD_SIZE"])


def is_first() -> bool:
    """Whether this process speaks for all: it is rank 0, or there are no others."""
    return not is_launched() or launched_rank() == 0
