"""`shardscope compare`: the first step, module and tensor whose values differ between two runs."""

from __future__ import annotations

import os
import shlex
import sys
from glob import glob

import click
from msgspec.structs import replace

from shardscope.cli.console import exit_code, print_error, print_out, show_progress
from shardscope.cli.destination import check_distinct, print_saved
from shardscope.cli.fail_on import parse_share
from shardscope.cli.json_result import add_recording
from shardscope.cli.shared_options import force_option, strict_option
from shardscope.cli.verb import Verb
from shardscope.errors import RecordingError
from shardscope.record import Recording, check_output, load, merge_files, save
from shardscope.record.patterns import is_pattern
from shardscope.report.runs.compare_runs import compare_values
from shardscope.report.text.summary import render_summary

_INCOMPARABLE = 2  # exit code
_ENDINGS = (".json", ".json.gz", ".jsonl", ".parquet")


@click.command(
    "compare",
    cls=Verb,
    examples=[
        "shardscope compare one-gpu.json.gz eight-gpus.json.gz",
        "shardscope compare 'good/step-*.json.gz' 'bad/step-*.json.gz'",
        "shardscope compare runs/main runs/branch --tolerance 1e-3 -o compared.json.gz",
    ],
    fails_if="A tensor deviates by more than noise, ranks disagree, or, with --strict, there is a "
    "gap.",
)
@click.argument("run_a", metavar="RUN_A")
@click.argument("run_b", metavar="RUN_B")
@click.option(
    "--tolerance",
    metavar="SHARE",
    default="0",
    show_default="noise only",
    help="Accept relative deviations up to this percentage or fraction, such as 1% or 0.01.",
)
@click.option("-o", "--output", metavar="OUT", help="Also save the comparison (.json, .json.gz).")
@force_option
@strict_option
@click.pass_context
def command(
    ctx: click.Context,
    run_a: str,
    run_b: str,
    tolerance: str,
    output: str | None,
    force: bool,
    strict: bool,
) -> None:
    """Find where the values of two real runs begin to differ: step, module and tensor.

    Both were recorded with trace(model, values=...). Their layouts and numbers of ranks may differ:
    norms and sums of full tensors are compared, in the order of execution, with what rounding
    explains. A RUN is a recording, a folder with one of each rank, or a quoted pattern such as
    'step-*.json.gz'.

    What the two programs do (collectives, memory, graph breaks) is compared by shardscope diff;
    one model on a single device and on ranks, without a cluster, by shardscope parity.
    """
    share = parse_share(tolerance, option="--tolerance")
    files = [_list_files(run) for run in (run_a, run_b)]
    if output is not None:
        check_distinct(output, [*files[0], *files[1]])
        check_output(output, force=force)
    with show_progress("comparing") as report:
        recordings = []
        for names in files:
            report(f"reading {names[0]}")
            recordings.append(_load(names))
        report("looking for the first difference")
        result = compare_values(*recordings, titles=(run_a, run_b), tolerance=share)
    command_line = shlex.join(["shardscope", *sys.argv[1:]])
    result = replace(result, run=replace(result.run, command=command_line))
    print_out(render_summary(result))
    saved = [] if output is None else [save(result, output, force=force)]
    add_recording(result, saved)
    for path in saved:
        print_saved(path)
    incomparable = result.comparisons[0].incomparable
    if incomparable and not result.findings:
        print_error(f"the runs cannot be compared further: {incomparable}.")
        ctx.exit(_INCOMPARABLE)
    ctx.exit(exit_code(result, is_strict=strict))


def _list_files(run: str) -> list[str]:
    """The recordings that a run on the command line names."""
    if os.path.isdir(run):
        names = (os.path.join(run, name) for name in sorted(os.listdir(run)))
        files = [name for name in names if name.endswith(_ENDINGS)]
        if not files:
            raise RecordingError(
                f"the folder '{run}' has no recordings, whose names end in "
                f"{', '.join(_ENDINGS)}. Name the folder that the ranks wrote to."
            )
        return files
    if is_pattern(run) and not os.path.lexists(run):
        files = sorted(glob(run))
        if not files:
            raise RecordingError(
                f"no file matches '{run}'. Name the recordings of a run's ranks with a pattern."
            )
        return files
    return [run]


def _load(names: list[str]) -> Recording:
    return load(names[0]) if len(names) == 1 else merge_files(names)
