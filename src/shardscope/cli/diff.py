"""`shardscope diff`: what changed from one recording to another."""

from __future__ import annotations

import click

from shardscope.cli.console import print_out, show_progress, write_out
from shardscope.cli.options import no_fold_option
from shardscope.cli.triggers import (
    find_reasons,
    parse_areas,
    parse_tolerance,
    parse_triggers,
)
from shardscope.comm.review import review
from shardscope.compile.explain.compare import review_explanations
from shardscope.errors import DiffError
from shardscope.record import Recording, load
from shardscope.report.compare.changes import Changes
from shardscope.report.compare.compare import compare
from shardscope.report.compare.document import encode_changes
from shardscope.report.compare.markdown import render_changes_markdown
from shardscope.report.compare.text import render_changes
from shardscope.report.names import make_inert

__all__ = ["command"]

_FORMATS = ("text", "json", "markdown")


@click.command("diff")
@click.argument("before", metavar="BEFORE")
@click.argument("after", metavar="AFTER")
@click.option("--area", "areas", multiple=True, metavar="AREA[,…]", help="Show these alone.")
@click.option("--module", metavar="PATTERN", help="Show these alone: layers.*.attn.")
@click.option(
    "--tolerance", metavar="SHARE", default="0", help="Bytes may change by so much, such as 5%."
)
@click.option(
    "--fail-on",
    "fail_on",
    multiple=True,
    metavar="WHAT[,…]",
    help="Exit with 1 on: any, worse, an AREA, or AREA:worse, AREA:added, AREA:gone, AREA:changed.",
)
@click.option(
    "--format", "form", type=click.Choice(_FORMATS), default="text", show_default=True, help="Look."
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
    """Tell what changed from the recording BEFORE to the recording AFTER.

    AREA is findings, collectives, bytes, causes, memory, graph-breaks, placements, coverage,
    parity, parallel, diagnoses, gaps or run. Exits with 0 unless --fail-on says otherwise; it
    heeds what is shown.
    """
    triggers, kept = parse_triggers(fail_on), parse_areas(areas)
    share = parse_tolerance(tolerance)
    with show_progress("comparing") as report:
        both = []
        for file in (before, after):
            report(f"reading {file}")
            both.append(_load(file))
        report("looking for changes")
        changes = compare(*both, titles=(before, after), is_folded=not no_fold)
    changes = changes.beyond(share)
    if kept:
        changes = changes.only_areas(kept)
    if module is not None:
        changes = _select(changes, module)
    _print(changes, form, is_complete=no_fold)
    reasons = list(find_reasons(changes, triggers))
    if reasons:
        click.echo(make_inert(f"shardscope: failed on {', '.join(reasons)}"), err=True)
    ctx.exit(int(bool(reasons)))


def _load(file: str) -> Recording:
    return review_explanations(review(load(file)))


def _select(changes: Changes, pattern: str) -> Changes:
    if not changes.has_module(pattern):
        example = next((name for name in changes.modules if "." in name), "")
        hint = f", such as {example}" if example else ""
        raise DiffError(
            f"--module {pattern!r} matches no module of either recording. Write a full name"
            f"{hint}; * stands for anything."
        )
    return changes.only_modules(pattern)


def _print(changes: Changes, form: str, *, is_complete: bool) -> None:
    if form == "json":
        write_out([encode_changes(changes)])
    elif form == "markdown":
        write_out([render_changes_markdown(changes).encode()])
    else:
        print_out(render_changes(changes, is_complete=is_complete))
