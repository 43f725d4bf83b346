"""`shardscope export`: a recording for other tools."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import click

from shardscope.cli.console import print_line, show_progress, write_out
from shardscope.cli.options import force_option, strict_option
from shardscope.errors import OutputError
from shardscope.record import Recording, check_output, encode_pieces, load, write_file
from shardscope.report.layout import plural
from shardscope.report.perfetto import render_perfetto_pieces
from shardscope.report.table import render_csv_pieces

__all__ = ["command"]

_RENDERERS: dict[str, Callable[[Recording], Iterator[bytes]]] = {
    "perfetto": render_perfetto_pieces,
    "csv": render_csv_pieces,
    "json": encode_pieces,
}
_ENDINGS = {"perfetto": ".perfetto.json", "csv": ".csv", "json": ".json"}
_INPUT_ENDINGS = (".gz", ".jsonl", ".json")


@click.command("export")
@click.argument("file", metavar="FILE")
@click.option("--to", "form", type=click.Choice(list(_RENDERERS)), required=True, help="Format.")
@click.option(
    "-o", "--output", metavar="OUT", help="File to write (gzip if .gz); - is standard output."
)
@force_option
@strict_option
@click.pass_context
def command(
    ctx: click.Context, file: str, form: str, output: str | None, force: bool, strict: bool
) -> None:
    """Turn the recording FILE into another format, next to it unless OUT says otherwise.

    A Perfetto trace opens in https://ui.perfetto.dev and chrome://tracing.
    """
    target = output or _name_output(file, form)
    if target != "-":
        check_output(target, force=force)
    with show_progress(f"reading {file}"):
        recording = load(file)
    _tell_gaps(recording)
    _tell_nothing(recording, form)
    pieces = _RENDERERS[form](recording)
    if target == "-":
        # On a terminal the output itself says how far it is.
        with show_progress("writing", is_shown=not sys.stdout.isatty()):
            write_out(pieces)
    else:
        with show_progress(f"writing {target}"):
            write_file(pieces, target, force=force)
        print_line(f"wrote {target}")
    ctx.exit(int(strict and bool(recording.gaps)))


def _tell_nothing(recording: Recording, form: str) -> None:
    """Say so where a table will be empty: it has collectives, and nothing else."""
    if form == "csv" and not recording.collectives:
        click.echo(
            "shardscope: the recording has no collectives, which are all that a CSV file holds; "
            "export --to json has the rest",
            err=True,
        )


def _tell_gaps(recording: Recording) -> None:
    if recording.gaps:
        gaps = plural(len(recording.gaps), "gap")
        click.echo(f"shardscope: the recording has {gaps}; `shardscope show` prints them", err=True)


def _name_output(file: str, form: str) -> str:
    path = Path(file)
    stem = path.name
    for ending in _INPUT_ENDINGS:
        stem = stem.removesuffix(ending)
    target = str(path.with_name(stem + _ENDINGS[form]))
    if target == str(path):
        raise OutputError(
            f"'{file}' is JSON already, and would be written over itself. Name another with -o."
        )
    return target
