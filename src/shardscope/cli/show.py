"""`shardscope show`: print a recording, or several ranks' recordings as one."""

from __future__ import annotations

import click

from shardscope.cli.console import exit_code, print_out, show_progress
from shardscope.cli.loading import load_reviewed
from shardscope.cli.options import by_option, no_fold_option, strict_option
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
        recording = load_reviewed(files, report)
        report("adding up")
        summary = render_summary(recording, by=by, is_folded=not no_fold)
    print_out(summary)
    ctx.exit(exit_code(recording, is_strict=strict))
