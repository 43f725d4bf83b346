"""`shardscope tui`: walk through a recording in the terminal."""

from __future__ import annotations

import os
import sys

import click

from shardscope.cli.console import show_progress
from shardscope.cli.loading import load_reviewed
from shardscope.cli.verb import Verb
from shardscope.errors import OutputError


@click.command(
    "tui",
    cls=Verb,
    examples=["shardscope tui run.json.gz", "shardscope tui run-*.json.gz"],
    instead_of_json="It draws a screen; shardscope show --json prints the recording.",
)
@click.argument("files", nargs=-1, required=True, metavar="FILE...")
def command(files: tuple[str, ...]) -> None:
    """Browse a recording's modules, collectives and findings; several FILEs are one run.

    The keys are listed at the bottom of the screen; q quits.
    """
    _check_terminal()
    with show_progress("opening") as report:
        recording = load_reviewed(files, report)
        report("starting")
        # Imported here so that --help does not wait for it.
        from shardscope.report.tui.browser import Browser

        browser = Browser(recording, has_colors=not os.environ.get("NO_COLOR"))
    browser.run()


def _check_terminal() -> None:
    for name, stream in (("stdin", sys.stdin), ("stdout", sys.stdout)):
        if stream is not None and stream.isatty():
            continue
        raise OutputError(
            f"tui needs an interactive terminal; {name} is not one. "
            "Print the recording with shardscope show instead."
        )
