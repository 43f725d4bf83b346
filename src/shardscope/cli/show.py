"""`shardscope show`: print a recording, or several ranks' recordings as one."""

from __future__ import annotations

from collections.abc import Callable

import click

from shardscope.cli.console import exit_code, print_out, show_progress
from shardscope.cli.options import by_option, no_fold_option, strict_option
from shardscope.comm.review import review
from shardscope.compile.explain.compare import review_explanations
from shardscope.record import Recording, load, merge_files
from shardscope.report.text import View, render_summary

__all__ = ["command"]


@click.command("show")
@click.argument("files", nargs=-1, required=True, metavar="FILE...")
@by_option
@strict_option
@no_fold_option
@click.pass_context
def command(
    ctx: click.Context, files: tuple[str, ...], by: View, strict: bool, no_fold: bool
) -> None:
    """Print what a recording holds; several FILEs are shown as one run.

    Exits with 1 if there is a finding.
    """
    with show_progress("showing") as report:
        recording = _load_all(files, report)
        report("adding up")
        summary = render_summary(recording, by=by, is_folded=not no_fold)
    print_out(summary)
    ctx.exit(exit_code(recording, is_strict=strict))


def _load_all(files: tuple[str, ...], report: Callable[[str], None]) -> Recording:
    """One file as it is; several merged."""
    if len(files) > 1:
        recording = merge_files(files, report=report)
    else:
        report(f"reading {files[0]}")
        recording = load(files[0])
    report("comparing ranks")
    return review_explanations(review(recording))
