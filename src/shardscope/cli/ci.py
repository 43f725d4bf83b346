"""`shardscope ci`: records programs, checks their contract and compares them with a base commit."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import click

from shardscope.cli.ci_comment import (
    CIResult,
    find_pull_request,
    render_comment,
    summarize_result,
)
from shardscope.cli.ci_formats import annotate_violations, render_annotations
from shardscope.cli.ci_runs import BaseCheckout, RecordRun, checked_out, record
from shardscope.cli.ci_settings import CISettings, is_affected, read_settings
from shardscope.cli.console import print_line, print_out, show_progress, write_out
from shardscope.cli.contract import read_contract_figures
from shardscope.cli.destination import print_saved
from shardscope.cli.fail_on import Trigger, find_reasons, parse_share, parse_triggers
from shardscope.cli.json_result import add_message, current_json
from shardscope.cli.loading import load_recordings, load_reviewed
from shardscope.cli.verb import Verb
from shardscope.contract import check
from shardscope.contract.violation_text import render_plain
from shardscope.errors import ShardscopeError, TargetError
from shardscope.record import Recording, Severity, write_file
from shardscope.record.text import sanitize_text
from shardscope.report.compare.changes import Changes
from shardscope.report.compare.changes_text import render_changes
from shardscope.report.compare.compare_recordings import compare
from shardscope.report.export.annotations import (
    Annotation,
    annotate_changes,
    annotate_findings,
    find_program,
)
from shardscope.report.result.figures import Figures
from shardscope.report.result.recording_figures import read_changes

_FILES = {"sarif": "shardscope.sarif", "gitlab": "gl-code-quality-report.json"}
_BASES = ("GITHUB_BASE_REF", "CI_MERGE_REQUEST_DIFF_BASE_SHA")
"""Variables in which GitHub Actions and GitLab CI name the base of a pull request."""


@click.command(
    "ci",
    cls=Verb,
    examples=[
        "shardscope ci",
        "shardscope ci --record 'trace train.py --mesh dp=2,tp=4' --base main",
        "shardscope ci --no-base model.py train.py",
        "shardscope ci --output shardscope-ci --comment --fail-on worse",
    ],
    fails_if="A limit of the contract is exceeded, a change matches --fail-on, or a recorded check "
    "has found that ranks may diverge.",
)
@click.argument("files", nargs=-1, metavar="[CHANGED]...")
@click.option(
    "--record",
    "records",
    multiple=True,
    metavar="COMMAND",
    help="Command that records, without the word shardscope; may be given several times.",
)
@click.option(
    "--contract",
    "path",
    metavar="FILE",
    default="shardscope.toml",
    show_default=True,
    help="File with the limits in [contract], and in [ci] what to record.",
)
@click.option(
    "--base",
    metavar="REF",
    show_default="the base of the pull request in GitHub Actions and GitLab CI",
    help="Branch or commit to compare with, at the commit where this branch left it.",
)
@click.option("--no-base", is_flag=True, help="Compare with nothing; check the contract only.")
@click.option(
    "--fail-on",
    "fail_on",
    multiple=True,
    metavar="WHAT[,…]",
    help="Exit with 1 on these changes since the base, as in shardscope diff.",
)
@click.option(
    "--tolerance", metavar="SHARE", help="Ignore changes of bytes up to this share, such as 5%."
)
@click.option(
    "--output",
    "-o",
    metavar="FOLDER",
    help="Keep the recordings there, with comment.md, shardscope.sarif and a GitLab report.",
)
@click.option(
    "--comment",
    is_flag=True,
    help="Write the result as a comment on the pull request, with GITHUB_TOKEN.",
)
@click.pass_context
def command(
    ctx: click.Context,
    files: tuple[str, ...],
    records: tuple[str, ...],
    path: str,
    base: str | None,
    no_base: bool,
    fail_on: tuple[str, ...],
    tolerance: str | None,
    output: str | None,
    comment: bool,
) -> None:
    """Record programs, check their contract, and compare them with the base of this branch.

    The commands are in [ci] of shardscope.toml, as record = ["trace train.py --mesh dp=8"]. If
    CHANGED files are named, as pre-commit does, nothing is done unless one of them can affect the
    programs. In GitHub Actions the result is also added to the job's summary. An option with an
    empty value is as if it were not given.
    """
    if base and no_base:
        raise TargetError("--base and --no-base contradict each other. Give one of them.")
    settings = read_settings(path, records=records, fail_on=fail_on, tolerance=tolerance)
    triggers = parse_triggers(settings.fail_on)
    share = parse_share(settings.tolerance, option="--tolerance")
    if files and not is_affected(settings.commands, files):
        print_line("shardscope ci: the changed files are not part of the recorded programs")
        return
    reference = None if no_base else base or next(filter(None, map(os.environ.get, _BASES)), None)
    with (
        _open_output(output) as folder,
        nullcontext() if reference is None else checked_out(reference) as base_checkout,
    ):
        heads = _record_head(settings, folder)
        recordings = load_recordings([run.path for run in heads], lambda _: None)
        changes, notes = _compare_with_base(heads, base_checkout, folder, share)
        result = _judge(settings, recordings, changes, triggers, notes)
        annotations = _annotate(result, recordings, path)
        _report(result, annotations, folder if output else None, is_commented=comment)
    ctx.exit(int(result.is_failed))


@contextmanager
def _open_output(output: str | None) -> Iterator[Path]:
    if output is not None:
        yield Path(output)
        return
    with tempfile.TemporaryDirectory(prefix="shardscope-ci-") as folder:
        yield Path(folder)


def _record_head(settings: CISettings, folder: Path) -> list[RecordRun]:
    runs = []
    with show_progress("recording") as report:
        for run in record(settings.commands, folder / "head", report):
            if not run.is_recorded:
                click.echo("\n".join(map(sanitize_text, run.failure.splitlines())), err=True)
                raise ShardscopeError(
                    f"`shardscope {run.command.text}` recorded nothing; what it printed is above. "
                    "Make it work on its own first."
                )
            runs.append(run)
    return runs


def _compare_with_base(
    heads: list[RecordRun], base: BaseCheckout | None, folder: Path, share: float
) -> tuple[list[Changes], list[str]]:
    """The changes of each command since the base, and what could not be compared."""
    changes: list[Changes] = []
    notes: list[str] = []
    if base is None:
        return changes, notes
    commands = [head.command for head in heads]
    with show_progress(f"recording {base.name}") as report:
        runs = record(
            commands, folder / "base", report, folder=base.folder, environment=base.environment
        )
        for head, run in zip(heads, runs, strict=True):
            if run.is_recorded:
                before, after = (load_reviewed([side.path], report) for side in (run, head))
                titles = (f"{run.command.text} at {base.name}", "this branch")
                changes.append(compare(before, after, titles=titles).beyond(share))
            else:
                notes.append(
                    f"not compared: `shardscope {run.command.text}` recorded nothing at the base "
                    f"{base.name}: {run.failure.splitlines()[-1]}"
                )
    return changes, notes


def _judge(
    settings: CISettings,
    recordings: list[Recording],
    changes: list[Changes],
    triggers: list[Trigger],
    notes: list[str],
) -> CIResult:
    contract = settings.contract
    return CIResult(
        contract=contract,
        violations=() if contract is None else check(contract.contract, *recordings),
        changes=tuple(changes),
        divergences=tuple(
            finding
            for recording in recordings
            for finding in recording.findings
            if recording.checks and finding.severity is not Severity.INFO
        ),
        reasons=tuple(
            reason for compared in changes for reason in find_reasons(compared, triggers)
        ),
        notes=tuple(notes),
    )


def _annotate(result: CIResult, recordings: list[Recording], path: str) -> list[Annotation]:
    """Findings, violations and what got worse, each at its line."""
    annotations = [
        annotation
        for recording in recordings
        for annotation in annotate_findings(recording, fallback=path)
    ]
    if result.contract is not None:
        annotations += annotate_violations(result.violations, result.contract)
    program = next(filter(None, map(find_program, recordings)), path)
    for changes in result.changes:
        annotations += annotate_changes(changes, fallback=program)
    return annotations


def _report(
    result: CIResult, annotations: list[Annotation], folder: Path | None, *, is_commented: bool
) -> None:
    for violation in result.violations:
        for line in (*render_plain(violation).splitlines(), ""):
            print_line(line)
    for changes in result.changes:
        print_out(render_changes(changes))
    for note in result.notes:
        print_line(f"note: {note}")
        add_message(note)
    if document := current_json():
        document.add_figures(
            _read_figures(result), summarize_result(result), has_problems=result.is_failed
        )
    body = render_comment(result)
    if folder is not None:
        files = {"comment.md": iter([body.encode()])}
        for form, name in _FILES.items():
            files[name] = render_annotations(annotations, form, category="ci")
        for name, chunks in files.items():
            write_file(chunks, folder / name, force=True)
            print_saved(folder / name)
        _set_outputs(folder=str(folder), sarif=str(folder / _FILES["sarif"]))
    if os.environ.get("GITHUB_ACTIONS") == "true":
        write_out(render_annotations(annotations, "github", category="ci"))
    summary = os.environ.get("GITHUB_STEP_SUMMARY")
    if summary:
        with open(summary, "a", encoding="utf-8") as file:
            file.write(body)
    if is_commented:
        _write_comment(body)
    print_line(f"shardscope ci: {summarize_result(result)}")


def _read_figures(result: CIResult) -> Figures:
    contract = result.contract
    return Figures(
        comparisons=tuple(map(read_changes, result.changes)),
        contract=None if contract is None else read_contract_figures(contract, result.violations),
    )


def _set_outputs(**values: str) -> None:
    """Set outputs of a step of GitHub Actions, where this is one."""
    path = os.environ.get("GITHUB_OUTPUT")
    if path:
        with open(path, "a", encoding="utf-8") as file:
            file.writelines(f"{name}={value}\n" for name, value in values.items())


def _write_comment(body: str) -> None:
    """Write the comment, or say why not: a comment is never a reason to fail."""
    pull_request = find_pull_request()
    outcome = pull_request if isinstance(pull_request, str) else pull_request.write_comment(body)
    if os.environ.get("GITHUB_ACTIONS") == "true" and outcome.startswith("no comment"):
        write_out([f"::notice title=shardscope::{sanitize_text(outcome)}.\n".encode()])
    else:
        print_line(f"{outcome}.")
