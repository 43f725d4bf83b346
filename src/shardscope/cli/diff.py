"""`shardscope diff`: what changed from one recording to another."""

from __future__ import annotations

import shlex

import click

from shardscope.cli.ci_formats import CI_FORMATS, render_annotations
from shardscope.cli.console import print_note, print_out, show_progress, write_out
from shardscope.cli.fail_on import find_reasons, parse_areas, parse_share, parse_triggers
from shardscope.cli.json_result import check_stdout_is_free, current_json
from shardscope.cli.shared_options import no_fold_option
from shardscope.cli.verb import Verb, suggest
from shardscope.comm.findings import review
from shardscope.compile.explain.compare import review_explanations
from shardscope.errors import DiffError
from shardscope.record import Recording, load
from shardscope.report.compare.changes import Changes
from shardscope.report.compare.changes_markdown import encode_changes, render_changes_markdown
from shardscope.report.compare.changes_text import render_changes
from shardscope.report.compare.compare_recordings import compare
from shardscope.report.export.annotations import annotate_changes, find_program
from shardscope.report.result.figures import Figures
from shardscope.report.result.recording_figures import read_changes, summarize_changes

_FORMATS = ("text", "json", "markdown", *CI_FORMATS)


@click.command(
    "diff",
    cls=Verb,
    examples=[
        "shardscope diff before.json.gz after.json.gz",
        "shardscope diff main.json branch.json --fail-on worse --tolerance 5%",
        "shardscope diff main.json branch.json --area memory --format markdown",
    ],
    fails_if="A change that is shown matches --fail-on.",
)
@click.argument("before", metavar="BEFORE")
@click.argument("after", metavar="AFTER")
@click.option("--area", "areas", multiple=True, metavar="AREA[,…]", help="Show only these areas.")
@click.option(
    "--module",
    metavar="PATTERN",
    help="Show only modules that match, such as 'layers.*.attn' or '**.attn', and their children.",
)
@click.option(
    "--tolerance",
    metavar="SHARE",
    default="0",
    show_default=True,
    help="Ignore changes of bytes up to this percentage or fraction, such as 5% or 0.05.",
)
@click.option(
    "--fail-on",
    "fail_on",
    multiple=True,
    metavar="WHAT[,…]",
    help="Exit with 1 on any change, on worse ones, on changes of an AREA, or on AREA:worse, "
    "AREA:added, AREA:gone or AREA:changed.",
)
@click.option(
    "--format",
    "form",
    type=click.Choice(_FORMATS),
    default="text",
    show_default=True,
    help="Output format; github, sarif and gitlab have only what got worse.",
)
@no_fold_option
@click.pass_context
def command(
    ctx: click.Context,
    before: str,
    after: str,
    areas: tuple[str, ...],
    module: str | None,
    tolerance: str,
    fail_on: tuple[str, ...],
    form: str,
    no_fold: bool,
) -> None:
    """Show what changed from the recording BEFORE to the recording AFTER.

    AREA is findings, collectives, bytes, causes, memory, graph-breaks, placements, coverage,
    parity, parallel, diagnoses, gaps or run. Exits with 0 unless --fail-on matches; changes that
    --area, --module or --tolerance hides are ignored. Tells what the programs do: values of tensors
    are compared by shardscope compare.
    """
    if form != _FORMATS[0]:
        check_stdout_is_free(f"--format {form}", "Leave one of them out.")
    triggers, chosen_areas = parse_triggers(fail_on), parse_areas(areas)
    share = parse_share(tolerance, option="--tolerance")
    with show_progress("comparing") as report:
        recordings = []
        for file in (before, after):
            report(f"reading {file}")
            recordings.append(_load(file))
        report("looking for changes")
        changes = compare(*recordings, titles=(before, after), is_folded=not no_fold)
    changes = changes.beyond(share)
    if chosen_areas:
        changes = changes.only_areas(chosen_areas)
    if module is not None:
        changes = _select(changes, module)
    reasons = list(find_reasons(changes, triggers))
    if result := current_json():
        result.add_figures(
            Figures(comparisons=(read_changes(changes),)),
            summarize_changes(changes),
            has_problems=bool(reasons) or any(row.is_worse for row in changes.rows),
            more=[shlex.join(["shardscope", "diff", before, after, "--format", "json"])],
        )
    elif form in CI_FORMATS:
        annotations = list(annotate_changes(changes, fallback=find_program(recordings[1]) or after))
        write_out(render_annotations(annotations, form, category="diff"))
    else:
        _print(changes, form, is_complete=no_fold)
    if reasons:
        print_note(f"--fail-on matched: {', '.join(reasons)}")
    ctx.exit(int(bool(reasons)))


def _load(file: str) -> Recording:
    return review_explanations(review(load(file)))


def _select(changes: Changes, pattern: str) -> Changes:
    if not changes.has_module(pattern):
        example = next((name for name in changes.modules if "." in name), "")
        hint = f", such as {example}" if example else ""
        raise DiffError(
            f"--module {pattern!r} matches no module of either recording."
            f"{suggest(pattern, changes.modules)} Give a full name{hint}, or a pattern: * matches "
            "one part of a name, ** any number of parts."
        )
    return changes.only_modules(pattern)


def _print(changes: Changes, form: str, *, is_complete: bool) -> None:
    if form == "json":
        write_out([encode_changes(changes)])
    elif form == "markdown":
        write_out([render_changes_markdown(changes).encode()])
    else:
        print_out(render_changes(changes, is_complete=is_complete))
