"""The terminal, and what a recording means for the exit code."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from io import TextIOWrapper
from threading import Timer
from typing import TextIO, cast, final

import click
from rich.console import Console, RenderableType
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.segment import Segments

from shardscope.cli.streams import silence_stdout, writing_out
from shardscope.record import Recording, Severity
from shardscope.report.guarded import GuardedFile
from shardscope.report.names import make_inert

__all__ = ["exit_code", "print_line", "print_out", "print_traceback", "show_progress", "write_out"]

_PATIENCE_S = 0.5  # until progress is worth showing


@final
class _Console(Console):
    """A console whose reader may leave (`| head`) without ending the command."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        silence_stdout()


def print_out(*things: RenderableType) -> None:
    """Print to standard output: colours on a terminal unless NO_COLOR, plain otherwise."""
    with writing_out():
        console = _open_console()
        with show_progress("laying out"):
            drawn = [Segments(list(console.render(thing))) for thing in things]
        for one in drawn:
            console.print(one)


def print_line(text: str = "") -> None:
    """Print one line of our own, however long, with whatever strangers put in it made inert."""
    with writing_out():
        _open_console().print(make_inert(text), soft_wrap=True)


def print_traceback(error: BaseException) -> None:
    """Print an exception's traceback to standard error, for those who asked for it."""
    for line in "".join(traceback.format_exception(error)).splitlines():
        click.echo(make_inert(line), err=True)


def write_out(pieces: Iterable[bytes]) -> None:
    """Send bytes to standard output."""
    with writing_out():
        sys.stdout.buffer.writelines(pieces)


def _open_console() -> Console:
    if isinstance(sys.stdout, TextIOWrapper):
        # × and … are not in every encoding; a question mark is better than a traceback.
        sys.stdout.reconfigure(errors="replace")
    file = cast(TextIO, GuardedFile(sys.stdout))
    return _Console(file=file, highlight=False, markup=False, emoji=False)


@contextmanager
def show_progress(title: str, *, is_shown: bool = True) -> Iterator[Callable[[str], None]]:
    """A line on standard error that says what is being done and since when.

    On a terminal only, and only if it takes a while.
    """
    console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    # What the user's program prints belongs on standard output, wherever that goes.
    is_shared = sys.stdout is not None and sys.stdout.isatty()
    progress = Progress(*columns, console=console, transient=True, redirect_stdout=is_shared)
    task = progress.add_task(make_inert(title))
    timer = Timer(_PATIENCE_S, progress.start)
    timer.daemon = True
    if is_shown and console.is_terminal:
        timer.start()
    try:
        yield lambda doing: progress.update(task, description=make_inert(f"{title}: {doing}"))
    finally:
        timer.cancel()
        if timer.is_alive():
            timer.join()
        if progress.live.is_started:
            progress.stop()


def exit_code(recording: Recording, *, is_strict: bool = False) -> int:
    """1 for a finding that wants action, or for a gap if gaps are to be fatal; else 0."""
    has_finding = any(one.severity is not Severity.INFO for one in recording.findings)
    return int(has_finding or (is_strict and bool(recording.gaps)))
