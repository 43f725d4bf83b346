"""`shardscope merge`: join the recordings of a run's ranks into one file."""

from __future__ import annotations

import click

from shardscope.cli.console import exit_code, open_console
from shardscope.comm.review import review
from shardscope.record import Recording, check_output, count_ranks, merge_files, save
from shardscope.report.problems import render_problems

__all__ = ["command"]


@click.command("merge")
@click.argument("files", nargs=-1, required=True, metavar="FILE...")
@click.option(
    "-o", "--output", required=True, metavar="OUT", help="File to write (.json, .json.gz)."
)
@click.option("--force", is_flag=True, help="Overwrite OUT.")
@click.option("--strict", is_flag=True, help="Exit with 1 if the merged recording has gaps.")
@click.pass_context
def command(
    ctx: click.Context, files: tuple[str, ...], output: str, force: bool, strict: bool
) -> None:
    """Join FILEs, one per rank, into OUT, and check that the ranks agree.

    A FILE that cannot be read becomes a gap. Exits with 1 if there is a finding.
    """
    check_output(output, force=force)
    recording = review(merge_files(files))
    path = save(recording, output, force=force)
    console = open_console()
    console.print(_describe(recording, str(path)), soft_wrap=True)
    for problem in render_problems(recording):
        console.print(problem)
    ctx.exit(exit_code(recording, is_strict=strict))


def _describe(recording: Recording, path: str) -> str:
    run = recording.run
    return (
        f"{count_ranks(run.ranks):,} of {run.world_size:,} ranks, "
        f"{len(recording.collectives):,} collectives → {path}"
    )
