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
from shardscope.cli.destination import print_saved
from shardscope.cli.options import force_option
from shardscope.cli.recordings import load_recordings
from shardscope.cli.triggers import parse_share
from shardscope.cli.verb import Verb, VerbGroup
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
from shardscope.record import check_output, make_inert
from shardscope.record.encoding import encode_json
from shardscope.report.layout import plural
from shardscope.report.problems import describe_checks

__all__ = ["command"]

_DEFAULT = "shardscope.toml"
_STYLES = {"expected": "green", "actual": "bold red", "line": "dim", "remedy": "green"}


@click.group(
    "contract",
    cls=VerbGroup,
    examples=[
        "shardscope contract record step.json.gz memory.json.gz",
        "shardscope contract check step.json.gz memory.json.gz",
    ],
)
def command() -> None:
    """Check a program against limits on collectives, memory, graph breaks and findings.

    The limits are in a file such as shardscope.toml. record writes the current figures as limits;
    check fails when a limit is exceeded.
    """


@command.command(
    "check",
    cls=Verb,
    examples=[
        "shardscope contract check step.json.gz",
        "shardscope contract check step.json.gz --contract limits.toml --format github",
    ],
    fails_if="A limit is exceeded, or no RECORDING has the figure that it limits.",
)
@click.argument("files", nargs=-1, required=True, metavar="RECORDING...")
@click.option(
    "--contract",
    "path",
    metavar="FILE",
    default=_DEFAULT,
    show_default=True,
    help="File with the limits.",
)
@click.option(
    "--format",
    "form",
    type=click.Choice(["text", "github", "json"]),
    default="text",
    show_default=True,
    help="Output format; github prints annotations for GitHub Actions.",
)
@click.pass_context
def check_command(ctx: click.Context, files: tuple[str, ...], path: str, form: str) -> None:
    """Check RECORDINGs of a program against its contract.

    Each limit is compared with the recordings that have its figure (of trace, memory, explain, …);
    a limit whose figure was not recorded counts as exceeded.
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


@command.command(
    "record",
    cls=Verb,
    short_help="Save the figures of RECORDINGs as the limits of a contract.",
    examples=[
        "shardscope contract record step.json.gz",
        "shardscope contract record step.json.gz memory.json.gz --by axis --slack 5%",
    ],
)
@click.argument("files", nargs=-1, required=True, metavar="RECORDING...")
@click.option(
    "-o",
    "--output",
    metavar="OUT",
    default=_DEFAULT,
    show_default=True,
    help="File for the contract (.toml).",
)
@click.option(
    "--by",
    type=click.Choice(get_args(Grain)),
    default="module",
    show_default=True,
    help="Granularity of the limits on collectives.",
)
@click.option(
    "--slack",
    metavar="SHARE",
    default="0%",
    show_default=True,
    help="Allow this percentage or fraction more bytes than recorded, such as 5%; 100% at most.",
)
@force_option
def record_command(files: tuple[str, ...], output: str, by: Grain, slack: str, force: bool) -> None:
    """Save the figures of RECORDINGs of a program as the limits of its contract.

    Counts must stay equal; bytes and memory may shrink. With --force an existing contract is
    updated: its comments, its order and the limits that you added stay.
    """
    share = parse_share(slack, option="--slack", at_most=1)
    check_output(output, force=force)
    previous = read_contract(output) if os.path.isfile(output) else None
    with show_progress("recording") as report:
        recordings = load_recordings(files, report)
        report("measuring")
        contract = record_contract(*recordings, by=by, slack=share, previous=previous)
    write_contract(contract, output, force=force)
    print_saved(Path(output), _summarize_record(contract, previous))


def _summarize_record(contract: Contract, previous: Contract | None) -> str:
    num_limits = plural(len(contract.limits), "limit")
    if previous is None:
        return num_limits
    before, after = (
        {limit.selector for limit in version.limits} for version in (previous, contract)
    )
    num_removed = len(before - after)
    return (
        f"{num_limits}; removed {num_removed:,} that matched nothing" if num_removed else num_limits
    )
