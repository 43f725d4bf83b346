"""`shardscope show`: print a recording, or several ranks' recordings as one."""

from __future__ import annotations

from typing import get_args

import click
from rich.console import RenderableType

from shardscope.cli.console import exit_code, print_out, show_progress
from shardscope.cli.loading import choose_modules, load_reviewed
from shardscope.cli.options import by_option, no_fold_option, strict_option
from shardscope.record import Recording
from shardscope.report.text import View, render_summary
from shardscope.report.views import Subject, render_views

__all__ = ["command"]

_SUBJECTS: tuple[Subject, ...] = get_args(Subject)
_ALL = "all"


@click.command("show")
@click.argument("files", nargs=-1, required=True, metavar="FILE...")
@click.option(
    "--view",
    "views",
    type=click.Choice([*_SUBJECTS, _ALL]),
    multiple=True,
    help="Subject to show; may be repeated. [default: a summary of all]",
)
@click.option(
    "--module",
    "pattern",
    metavar="PATTERN",
    help="Keep modules that match, such as 'layers.*.attention', and those below them.",
)
@by_option
@strict_option
@no_fold_option
@click.pass_context
def command(
    ctx: click.Context,
    files: tuple[str, ...],
    views: tuple[str, ...],
    pattern: str | None,
    by: View,
    strict: bool,
    no_fold: bool,
) -> None:
    """Print what a recording holds; several FILEs are shown as one run.

    Exits with 1 if there is a finding, whatever is shown of the recording.
    """
    with show_progress("showing") as report:
        recording = load_reviewed(files, report)
        shown = recording if pattern is None else choose_modules(recording, pattern)
        report("adding up")
        printed = _render(shown, recording, views, by=by, is_folded=not no_fold)
    print_out(printed)
    ctx.exit(exit_code(recording, is_strict=strict))


def _render(
    recording: Recording, whole: Recording, views: tuple[str, ...], *, by: View, is_folded: bool
) -> RenderableType:
    if not views:
        return render_summary(recording, by=by, is_folded=is_folded)
    subjects = [one for one in _SUBJECTS if one in views or _ALL in views]
    return render_views(recording, subjects, by=by, is_folded=is_folded, whole=whole)
