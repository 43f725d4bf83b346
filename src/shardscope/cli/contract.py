"""`shardscope contract`: limits on what a program says and holds, checked and recorded."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

import click
import msgspec
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from shardscope.cli.console import print_line, print_out, show_progress, write_out
from shardscope.cli.options import force_option
from shardscope.cli.recordings import load_recordings
from shardscope.contract import (
    Breach,
    Contract,
    ContractFile,
    Figure,
    check,
    open_contract,
    read_contract,
    record_contract,
    write_contract,
)
from shardscope.contract.annotations import render_annotations
from shardscope.contract.recording import Grain
from shardscope.contract.telling import list_rows, summarize
from shardscope.errors import ContractError
from shardscope.record import check_output, make_inert
from shardscope.record.encoding import encode_json
from shardscope.report.layout import plural
from shardscope.report.problems import describe_checks

__all__ = ["command"]

_DEFAULT = "shardscope.toml"
_STYLES = {"expected": "green", "actual": "bold red", "line": "dim", "remedy": "green"}


@click.group("contract")
def command() -> None:
    """Hold a program to limits on what it says and holds, kept in a file such as shardscope.toml.

    record writes today's numbers as the limits; check fails when they do not hold any more.
    """


@command.command("check")
@click.argument("files", nargs=-1, required=True, metavar="RECORDING...")
@click.option(
    "--contract", "path", metavar="FILE", default=_DEFAULT, show_default=True, help="The contract."
)
@click.option(
    "--format",
    "form",
    type=click.Choice(["text", "github", "json"]),
    default="text",
    show_default=True,
    help="For people, for GitHub's annotations, or for programs.",
)
@click.pass_context
def check_command(ctx: click.Context, files: tuple[str, ...], path: str, form: str) -> None:
    """Check RECORDINGs of a program against its contract.

    Each limit is held against the recordings that looked at it (trace, memory, explain, …); one
    that none looked at does not hold. Exits with 1 if a limit does not hold.
    """
    file = open_contract(path)
    with show_progress("checking") as report:
        recordings = load_recordings(files, report)
        report("measuring")
        breaches = check(file.contract, *recordings)
    if form == "text" and any(one.figure is Figure.FINDINGS for one in file.contract.limits):
        print_out(Text(f"findings: {make_inert(describe_checks(*recordings))}"))
    _PRINTERS[form](file, breaches)
    ctx.exit(int(bool(breaches)))


def _print_text(file: ContractFile, breaches: Sequence[Breach]) -> None:
    for breach in breaches:
        print_out(_render(breach, file), Text())
    _print_summary(file, breaches)


def _print_github(file: ContractFile, breaches: Sequence[Breach]) -> None:
    # Not through the console, which would make a question mark of what it cannot print.
    for line in render_annotations(breaches, file, folder=os.getcwd()):
        write_out([line.encode("utf-8", "replace"), b"\n"])
    _print_summary(file, breaches)


def _print_json(file: ContractFile, breaches: Sequence[Breach]) -> None:
    report = {
        "contract": make_inert(file.path),
        "num_limits": len(file.contract.limits),
        "breaches": [
            {"line": file.lines.get(one.limit), **msgspec.to_builtins(one)} for one in breaches
        ],
    }
    write_out([msgspec.json.format(encode_json(report), indent=2), b"\n"])


def _print_summary(file: ContractFile, breaches: Sequence[Breach]) -> None:
    print_line(f"{file.path}: {summarize(breaches, len(file.contract.limits))}")


_PRINTERS = {"text": _print_text, "github": _print_github, "json": _print_json}


def _render(breach: Breach, file: ContractFile) -> RenderableType:
    place = f"  {file.path}:{file.lines.get(breach.limit, 1)}"
    head = Text(make_inert(breach.title), "bold").append(make_inert(place), "dim")
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for label, text in list_rows(breach):
        table.add_row(label, Text(text, _STYLES.get(label, "")))
    return Group(head, Padding(table, (0, 0, 0, 2)))


@command.command("record")
@click.argument("files", nargs=-1, required=True, metavar="RECORDING...")
@click.option(
    "-o", "--output", metavar="OUT", default=_DEFAULT, show_default=True, help="File to write."
)
@click.option(
    "--by",
    type=click.Choice(get_args(Grain)),
    default="module",
    show_default=True,
    help="How fine limits on collectives are.",
)
@click.option("--slack", metavar="SHARE", default="0%", help="More bytes than today, such as 5%.")
@force_option
def record_command(files: tuple[str, ...], output: str, by: Grain, slack: str, force: bool) -> None:
    """Write what RECORDINGs of a program show today as its contract.

    Counts are to stay as they are; bytes and memory may be less. With --force a contract that is
    there keeps its comments, its order and limits of your own, with today's numbers.
    """
    share = _parse_share(slack)
    check_output(output, force=force)
    previous = read_contract(output) if os.path.isfile(output) else None
    with show_progress("recording") as report:
        recordings = load_recordings(files, report)
        report("measuring")
        contract = record_contract(*recordings, by=by, slack=share, previous=previous)
    write_contract(contract, output, force=force)
    print_line(_summarize_record(contract, previous, output))


def _parse_share(text: str) -> float:
    try:
        number = float(text.strip().removesuffix("%"))
        share = number / 100 if text.strip().endswith("%") else number
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise ContractError(f"--slack {text!r:.60} is not understood. Give a share, such as 5%.")
    return share


def _summarize_record(contract: Contract, previous: Contract | None, output: str) -> str:
    written = f"wrote {plural(len(contract.limits), 'limit')} to {Path(output)}"
    if previous is None:
        return written
    before, after = ({one.selector for one in some.limits} for some in (previous, contract))
    num_gone = len(before - after)
    return f"{written}; {num_gone:,} that fitted nothing gone" if num_gone else written
