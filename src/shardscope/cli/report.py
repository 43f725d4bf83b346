"""`shardscope report`: a recording as an HTML page."""

from __future__ import annotations

import webbrowser
from collections.abc import Callable
from pathlib import Path

import click

from shardscope.cli.console import print_line, show_progress, write_out
from shardscope.cli.loading import check_apart, load_reviewed
from shardscope.cli.options import force_option
from shardscope.record import Recording, check_output, write_file
from shardscope.report.html import render_html
from shardscope.report.names import make_inert

__all__ = ["command"]

_INPUT_ENDINGS = (".gz", ".jsonl", ".json")
_ENDING = ".html"


@click.command("report")
@click.argument("files", nargs=-1, required=True, metavar="FILE...")
@click.option("-o", "--output", metavar="OUT", help="File to write (.html); - is standard output.")
@click.option("--against", metavar="OTHER", help="Earlier recording to compare with.")
@click.option("--open", "is_opened", is_flag=True, help="Open it in a browser.")
@force_option
def command(
    files: tuple[str, ...], output: str | None, against: str | None, is_opened: bool, force: bool
) -> None:
    """Draw a recording as one HTML file that opens offline; several FILEs are shown as one run.

    It is written next to the first FILE unless OUT says otherwise.
    """
    target = output or _name_output(files[0])
    if target != "-":
        check_apart(target, [*files, *filter(None, [against])])
        check_output(target, force=force)
    with show_progress("reporting") as report:
        document = _draw(files, against, report)
    if target == "-":
        write_out([document])
        return
    write_file(document, target, force=force)
    print_line(f"wrote {target}")
    if is_opened:
        _open(target)


def _draw(files: tuple[str, ...], against: str | None, report: Callable[[str], None]) -> bytes:
    other: Recording | None = None
    if against is not None:
        other = load_reviewed([against], report)
    recording = load_reviewed(files, report)
    report("drawing")
    titles = (against or "", _name_files(files))
    return render_html(recording, against=other, titles=titles).encode("utf-8")


def _name_files(files: tuple[str, ...]) -> str:
    more = f" and {len(files) - 1:,} more" if len(files) > 1 else ""
    return files[0] + more


def _open(target: str) -> None:
    """In a browser, if there is one: the file is there in any case."""
    if not webbrowser.open(Path(target).resolve().as_uri()):
        sentence = f"no browser could be started; open {target} yourself"
        click.echo(f"shardscope: {make_inert(sentence)}", err=True)


def _name_output(file: str) -> str:
    path = Path(file)
    stem = path.name
    for ending in _INPUT_ENDINGS:
        stem = stem.removesuffix(ending)
    return str(path.parent / (stem + _ENDING))  # of a folder too, which is refused when read
