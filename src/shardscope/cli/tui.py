"""`shardscope tui`: walk through a recording in the terminal."""

from __future__ import annotations

import os
import sys

import click

from shardscope.cli.console import show_progress
from shardscope.cli.loading import load_reviewed
from shardscope.errors import OutputError

__all__ = ["command"]


@click.command("tui")
@click.argument("files", nargs=-1, required=True, metavar="FILE...")
def command(files: tuple[str, ...]) -> None:
    """Walk through a recording's modules, collectives and findings; several FILEs are one run.

    The keys are at the bottom of the screen; q quits.
    """
    _check_terminal()
    with show_progress("opening") as report:
        recording = load_reviewed(files, report)
        report("starting")
        # Here, and not above: whoever asks for help need not wait for it.
        from shardscope.report.tui.browser import Browser

        browser = Browser(recording, has_colors=not os.environ.get("NO_COLOR"))
    browser.run()


def _check_terminal() -> None:
    if not all(stream is not None and stream.isatty() for stream in (sys.stdin, sys.stdout)):
        raise OutputError(
            "tui needs a terminal, and this is none. Print the recording with shardscope show, or "
            "run it where there is one."
        )
