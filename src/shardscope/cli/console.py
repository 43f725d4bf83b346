"""The terminal, and what a recording means for the exit code."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import TextIOWrapper
from typing import final

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from shardscope.record import Recording, Severity

__all__ = ["exit_code", "open_console", "show_progress"]


@final
class _Console(Console):
    """A console whose reader may leave (`| head`) without ending the command."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def open_console() -> Console:
    """Standard output: colours on a terminal unless NO_COLOR, plain otherwise."""
    if isinstance(sys.stdout, TextIOWrapper):
        # × and … are not in every encoding; a question mark is better than a traceback.
        sys.stdout.reconfigure(errors="replace")
    return _Console(highlight=False, markup=False, emoji=False)


@contextmanager
def show_progress(title: str, *, is_shown: bool = True) -> Iterator[Callable[[str], None]]:
    """A line on standard error that says what is being done and since when, on a terminal only."""
    console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    is_quiet = not (is_shown and console.is_terminal)
    with Progress(*columns, console=console, transient=True, disable=is_quiet) as progress:
        task = progress.add_task(title)
        yield lambda doing: progress.update(task, description=f"{title}: {doing}")


def exit_code(recording: Recording, *, is_strict: bool = False) -> int:
    """1 for a finding that wants action, or for a gap if gaps are to be fatal; else 0."""
    has_finding = any(one.severity is not Severity.INFO for one in recording.findings)
    return int(has_finding or (is_strict and bool(recording.gaps)))
