"""`shardscope show`: print a recording, or several ranks' recordings as one."""

from __future__ import annotations

import click

from shardscope.cli.console import exit_code, open_console
from shardscope.comm.review import review
from shardscope.record import Recording, load, merge_files
from shardscope.report.text import View, render_summary

__all__ = ["command", "load_all"]


@click.command("show")
@click.argument("files", nargs=-1, required=True, metavar="FILE...")
@click.option(
    "--by",
    type=click.Choice(["module", "axis", "kind", "cause"]),
    default="module",
    show_default=True,
    help="What to sort collectives by.",
)
@click.option("--strict", is_flag=True, help="Exit with 1 if the recording has gaps.")
@click.option("--no-fold", is_flag=True, help="Show every module, repeated and silent ones too.")
@click.pass_context
def command(
    ctx: click.Context, files: tuple[str, ...], by: View, strict: bool, no_fold: bool
) -> None:
    """Print what a recording holds; several FILEs are shown as one run.

    Exits with 1 if there is a finding.
    """
    recording = review(load_all(files))
    open_console().print(render_summary(recording, by=by, is_folded=not no_fold))
    ctx.exit(exit_code(recording, is_strict=strict))


def load_all(files: tuple[str, ...]) -> Recording:
    """One file as it is; several merged."""
    return load(files[0]) if len(files) == 1 else merge_files(files)
