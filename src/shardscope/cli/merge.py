"""`shardscope merge`: join the recordings of a run's ranks into one file."""

from __future__ import annotations

import click

from shardscope.cli.console import exit_code, show_progress
from shardscope.cli.destination import Destination, check_distinct
from shardscope.cli.shared_options import force_option, strict_option
from shardscope.cli.verb import FINDINGS_FAIL, Verb
from shardscope.comm.findings import review
from shardscope.compile.explain.compare import review_explanations
from shardscope.record import Recording, count_ranks, merge_files
from shardscope.record.units import plural
from shardscope.report.text.problems import render_problems


@click.command(
    "merge",
    cls=Verb,
    examples=["shardscope merge run-*.jsonl", "shardscope merge run-*.json.gz -o run.json.gz"],
    fails_if=FINDINGS_FAIL,
)
@click.argument("files", nargs=-1, required=True, metavar="FILE...")
@click.option(
    "-o",
    "--output",
    metavar="OUT",
    show_default="merged.shardscope.json.gz",
    help="File for the merged recording (.json, .json.gz or .parquet).",
)
@force_option
@strict_option
@click.pass_context
def command(
    ctx: click.Context, files: tuple[str, ...], output: str | None, force: bool, strict: bool
) -> None:
    """Merge recordings of a run, one FILE for each rank and command, and compare the ranks.

    A FILE that cannot be read becomes a gap.
    """
    if output is not None:
        check_distinct(output, files)
    destination = Destination("merged", output, force=force)
    with show_progress("merging") as report:
        merged = merge_files(files, report=report)
        report("comparing ranks")
        recording = review_explanations(review(merged))
    destination.finish(recording, _describe(recording), *render_problems(recording))
    ctx.exit(exit_code(recording, is_strict=strict))


def _describe(recording: Recording) -> str:
    run = recording.run
    num_ranks = f"{count_ranks(run.ranks):,} of {plural(run.world_size, 'rank')}"
    return f"{num_ranks}, {plural(len(recording.collectives), 'collective')}"
