"""`shardscope report`: a recording as an HTML page."""

from __future__ import annotations

import webbrowser
from collections.abc import Callable
from pathlib import Path

import click

from shardscope.cli.console import print_note, show_progress, write_out
from shardscope.cli.destination import check_distinct, name_after, save_file
from shardscope.cli.json_result import add_recording, check_stdout_is_free
from shardscope.cli.loading import load_reviewed
from shardscope.cli.shared_options import force_option
from shardscope.cli.verb import Verb
from shardscope.cli.verdict_options import add_expectations, verdict_options
from shardscope.record import Recording, check_output
from shardscope.report.html.communication_rows import MAX_CALLS
from shardscope.report.html.html import render_html

_MAX_BYTES = 5_000_000


@click.command(
    "report",
    cls=Verb,
    examples=[
        "shardscope report run.json.gz --open",
        "shardscope report after.json.gz --against before.json.gz -o report.html",
    ],
)
@click.argument("files", nargs=-1, required=True, metavar="FILE...")
@click.option(
    "-o",
    "--output",
    metavar="OUT",
    show_default="FILE with the ending .html",
    help="File for the page; - is standard output.",
)
@click.option("--against", metavar="OTHER", help="Earlier recording to compare with.")
@verdict_options
@click.option("--open", "is_opened", is_flag=True, help="Open the page in a browser.")
@force_option
def command(
    files: tuple[str, ...],
    output: str | None,
    against: str | None,
    contract_path: str | None,
    ranks_per_node: int | None,
    is_opened: bool,
    force: bool,
) -> None:
    """Save a recording as one HTML page that opens offline; several FILEs are one run."""
    target = output or name_after(files[0], ".html")
    if target == "-":
        check_stdout_is_free("-o -", "Name a file with -o.")
    else:
        check_distinct(target, [*files, *filter(None, [against])])
        check_output(target, force=force)
    with show_progress("reporting") as report:
        recording = load_reviewed(files, report)
        recording = add_expectations(recording, contract_path, ranks_per_node)
        add_recording(recording, files)
        document = _draw(recording, files, against, report)
    _advise(recording, document)
    if target == "-":
        write_out([document])
        return
    save_file(document, target, force=force)
    if is_opened:
        _open(target)


def _draw(
    recording: Recording,
    files: tuple[str, ...],
    against: str | None,
    report: Callable[[str], None],
) -> bytes:
    before = None if against is None else load_reviewed([against], report)
    report("drawing")
    titles = (against or "", _name_files(files))
    return render_html(recording, against=before, titles=titles, files=files).encode("utf-8")


def _advise(recording: Recording, document: bytes) -> None:
    """Name the command for recordings that are too large for one file."""
    facts = []
    if len(recording.collectives) > MAX_CALLS:
        facts.append(f"lists {MAX_CALLS:,} of {len(recording.collectives):,} collectives at most")
    if len(document) > _MAX_BYTES:
        facts.append(f"has {len(document) / 1e6:.1f} MB")
    if facts:
        sentence = f"the page {' and '.join(facts)}. `shardscope serve` shows all of a recording."
        click.echo(f"shardscope: {sentence}", err=True)


def _name_files(files: tuple[str, ...]) -> str:
    more = f" and {len(files) - 1:,} more" if len(files) > 1 else ""
    return files[0] + more


def _open(target: str) -> None:
    """Open the file in a browser, if there is one."""
    if not webbrowser.open(Path(target).resolve().as_uri()):
        sentence = f"no browser could be started; open {target} by hand."
        print_note(sentence)
