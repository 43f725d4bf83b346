"""`shardscope export`: a recording for other tools."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import click

from shardscope.errors import OutputError
from shardscope.record import Recording, check_output, encode, load, save, write_file
from shardscope.report.perfetto import render_perfetto
from shardscope.report.table import render_csv

__all__ = ["command"]


def _encode_csv(recording: Recording) -> bytes:
    return render_csv(recording).encode("utf-8", "backslashreplace")


_RENDERERS: dict[str, Callable[[Recording], bytes]] = {
    "perfetto": render_perfetto,
    "csv": _encode_csv,
    "json": encode,
}
_ENDINGS = {"perfetto": ".perfetto.json", "csv": ".csv", "json": ".json"}
_INPUT_ENDINGS = (".gz", ".jsonl", ".json")


@click.command("export")
@click.argument("file", metavar="FILE")
@click.option("--to", "form", type=click.Choice(list(_RENDERERS)), required=True, help="Format.")
@click.option("-o", "--output", metavar="OUT", help="File to write; - is standard output.")
@click.option("--force", is_flag=True, help="Overwrite OUT.")
def command(file: str, form: str, output: str | None, force: bool) -> None:
    """Turn the recording FILE into another format, next to it unless OUT says otherwise.

    A Perfetto trace opens in https://ui.perfetto.dev and chrome://tracing.
    """
    if output == "-":
        sys.stdout.buffer.write(_RENDERERS[form](load(file)))
        sys.stdout.buffer.flush()  # here, where a reader that has left is no error
        return
    target = output or _name_output(file, form)
    check_output(target, force=force)
    recording = load(file)
    if form == "json":
        save(recording, target, force=force)
    else:
        write_file(_RENDERERS[form](recording), target, force=force)
    click.echo(f"wrote {target}")


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
