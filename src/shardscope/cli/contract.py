"""`shardscope contract`: checks and records limits on a program's collectives and memory."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

import click
import msgspec
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from shardscope.cli.ci_formats import CI_FORMATS, annotate_violations, render_annotations
from shardscope.cli.console import print_line, print_out, show_progress, write_out
from shardscope.cli.destination import check_is_file, print_saved
from shardscope.cli.fail_on import parse_share
from shardscope.cli.json_result import check_stdout_is_free, current_json
from shardscope.cli.loading import load_recordings
from shardscope.cli.program import LaunchedProgram, print_failures, program_options
from shardscope.cli.shared_options import force_option
from shardscope.cli.verb import Verb, VerbGroup
from shardscope.comm.findings import review
from shardscope.contract import (
    Contract,
    ContractFile,
    Figure,
    Violation,
    check,
    open_contract,
    read_contract,
    record_contract,
    write_contract,
)
from shardscope.contract.record import Grain
from shardscope.contract.toml_reader import has_limits, read_text
from shardscope.contract.violation_text import list_rows, summarize
from shardscope.record import Recording, check_output, sanitize_text
from shardscope.record.encoding import encode_json
from shardscope.record.units import plural
from shardscope.report.result.figures import ContractFigures, Figures, ViolationFigures
from shardscope.report.text.problems import describe_checks

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
    type=click.Choice(["text", "json", *CI_FORMATS]),
    default="text",
    show_default=True,
    help="Output format; github prints annotations for GitHub Actions, gitlab is its code quality "
    "report.",
)
@click.pass_context
def check_command(ctx: click.Context, files: tuple[str, ...], path: str, form: str) -> None:
    """Check RECORDINGs of a program against its contract.

    Each limit is compared with the recordings that have its figure (of trace, memory, explain, …);
    a limit whose figure was not recorded counts as exceeded.
    """
    if form != "text":
        check_stdout_is_free(f"--format {form}", "Leave one of them out.")
    file = open_contract(path)
    with show_progress("checking") as report:
        recordings = load_recordings(files, report)
        report("measuring")
        violations = check(file.contract, *recordings)
    if result := current_json():
        summary = f"{file.path}: {summarize(violations, len(file.contract.limits))}"
        again = shlex.join(["shardscope", "contract", "check", *files, "--contract", path])
        result.add_figures(
            Figures(contract=read_contract_figures(file, violations)),
            summary,
            has_problems=bool(violations),
            more=[f"{again} --format json"],
        )
        ctx.exit(int(bool(violations)))
    if form == "text" and any(limit.figure is Figure.FINDINGS for limit in file.contract.limits):
        print_out(Text(f"findings: {sanitize_text(describe_checks(*recordings))}"))
    if form in CI_FORMATS:
        annotations = list(annotate_violations(violations, file))
        write_out(render_annotations(annotations, form, category="contract"))
    if form in _PRINTERS:
        _PRINTERS[form](file, violations)
    ctx.exit(int(bool(violations)))


def read_contract_figures(file: ContractFile, violations: Sequence[Violation]) -> ContractFigures:
    """The violations of a contract, for a result as JSON."""
    return ContractFigures(
        contract=file.path,
        num_limits=len(file.contract.limits),
        num_violations=len(violations),
        violations=tuple(
            ViolationFigures(
                title=violation.title,
                expected=violation.expected,
                actual=violation.actual,
                line=f"{file.path}:{file.lines.get(violation.limit, 1)}",
                modules=violation.modules,
                evidence=tuple(
                    row.text for row in list_rows(violation) if row.label in ("cause", "line")
                ),
                remedy=violation.remedy,
            )
            for violation in violations
        ),
    )


def _print_text(file: ContractFile, violations: Sequence[Violation]) -> None:
    for violation in violations:
        print_out(_render(violation, file), Text())
    _print_summary(file, violations)


def _print_json(file: ContractFile, violations: Sequence[Violation]) -> None:
    report = {
        "contract": sanitize_text(file.path),
        "num_limits": len(file.contract.limits),
        "breaches": [
            {"line": file.lines.get(violation.limit), **msgspec.to_builtins(violation)}
            for violation in violations
        ],
    }
    write_out([msgspec.json.format(encode_json(report), indent=2), b"\n"])


def _print_summary(file: ContractFile, violations: Sequence[Violation]) -> None:
    print_line(f"{file.path}: {summarize(violations, len(file.contract.limits))}")


_PRINTERS = {"text": _print_text, "github": _print_summary, "json": _print_json}


def _render(violation: Violation, file: ContractFile) -> RenderableType:
    location = f"  {file.path}:{file.lines.get(violation.limit, 1)}"
    head = Text(sanitize_text(violation.title), "bold").append(sanitize_text(location), "dim")
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for label, text in list_rows(violation):
        table.add_row(label, Text(text, _STYLES.get(label, "")))
    return Group(head, Padding(table, (0, 0, 0, 2)))


@command.command(
    "record",
    cls=Verb,
    short_help="Save the figures of RECORDINGs as the limits of a contract.",
    examples=[
        "shardscope contract record step.json.gz",
        "shardscope contract record step.json.gz memory.json.gz --by axis --slack 5%",
        "shardscope contract record --nnodes 16 -- pretrain.py",
    ],
    takes_program=True,
)
@click.argument("files", nargs=-1, metavar="RECORDING...")
@program_options(
    "num_nodes", "num_per_node", "ranks", "steps", "gpu", target_only=(), target="files"
)
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
@click.pass_context
def record_command(
    ctx: click.Context,
    files: tuple[str, ...],
    program: LaunchedProgram | None,
    output: str,
    by: Grain,
    slack: str,
    force: bool,
) -> None:
    """Save the figures of RECORDINGs of a program as the limits of its contract.

    Counts must stay equal; bytes and memory may shrink. With --force an existing contract is
    updated: its comments, its order and the limits that you added stay.

    Instead of RECORDINGs, an unmodified training program may follow --: see shardscope run.
    """
    share = parse_share(slack, option="--slack", at_most=1)
    check_is_file(output)
    check_output(output, force=force)
    has_previous = os.path.isfile(output) and has_limits(read_text(output), output)
    previous = read_contract(output) if has_previous else None
    recordings: Sequence[Recording] = ()
    if program is not None:
        result = program.run()
        if print_failures(result):
            ctx.exit(2)
        recordings = [review(result.recording)]
    with show_progress("recording") as report:
        recordings = recordings or load_recordings(files, report)
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
