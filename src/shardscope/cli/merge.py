"""`shardscope merge`: join the recordings of a run's ranks into one file."""

from __future__ import annotations

import click

from shardscope.cli.console import exit_code, print_line, print_out, show_progress
from shardscope.cli.options import force_option, strict_option
from shardscope.comm.review import review
from shardscope.compile.explain.compare import review_explanations
from shardscope.record import Recording, check_output, count_ranks, merge_files, save
from shardscope.report.layout import plural
from shardscope.report.problems import render_problems

__all__ = ["command"]


@click.command("merge")
@click.argument("files", nargs=-1, required=True, metavar="FILE...")
@click.option(
    "-o", "--output", required=True, metavar="OUT", help="File to write (.json, .json.gz)."
)
@force_option
@strict_option
@click.pass_context
def command(
    ctx: click.Context, files: tuple[str, ...], output: str, force: bool, strict: bool
) -> None:
    """Join FILEs, one for each rank and instrument, into OUT, and check that the ranks agree.

    A FILE that cannot be read becomes a gap. Exits with 1 if there is a finding.
    """
    check_output(output, force=force)
    with show_progress("merging") as report:
        merged = merge_files(files, report=report)
        report("comparing ranks")
        recording = review_explanations(review(merged))
    try:
        print_out(_describe(recording), *render_problems(recording))
    finally:  # what cannot be printed can still be saved, and the other way round
        with show_progress(f"writing {output}"):
            save(recording, output, force=force)
    print_line(f"recording saved to {output}")
    ctx.exit(exit_code(recording, is_strict=strict))


def _describe(recording: Recording) -> str:
    run = recording.run
    num_ranks = f"{count_ranks(run.ranks):,} of {plural(run.world_size, 'rank')}"
    return f"{num_ranks}, {plural(len(recording.collectives), 'collective')}"
