"""`shardscope hang`: why a run hangs, or which rank is slow, from what its ranks left behind."""

from __future__ import annotations

import shlex
import sys

import click
from msgspec.structs import replace

from shardscope.cli.console import exit_code, print_out, show_progress
from shardscope.cli.destination import check_distinct, print_saved
from shardscope.cli.json_result import add_recording
from shardscope.cli.shared_options import force_option, strict_option
from shardscope.cli.verb import Verb
from shardscope.hang.explain import explain_hang
from shardscope.record import Recording, check_output, save
from shardscope.report.text.summary import render_summary
from shardscope.version import __version__


@click.command(
    "hang",
    cls=Verb,
    examples=[
        "shardscope hang dumps/",
        "shardscope hang 'nccl_trace_rank_*' run-*.jsonl slurm-4711.out",
        "shardscope hang stacks.txt ncclras.txt -o hang.json.gz",
    ],
    fails_if="A cause of a hang or a slow rank was found, or, with --strict, there is a gap.",
)
@click.argument("files", nargs=-1, required=True, metavar="FILE...")
@click.option("-o", "--output", metavar="OUT", help="Also save the analysis (.json, .json.gz).")
@force_option
@strict_option
@click.pass_context
def command(
    ctx: click.Context, files: tuple[str, ...], output: str | None, force: bool, strict: bool
) -> None:
    """Explain why a run hangs, from the files that its ranks left behind.

    A FILE is a file, a folder or a quoted pattern; formats are recognized and can be mixed: streams
    and recordings of shardscope trace, dumps of torch's Flight Recorder (pickle, JSON) and debug
    server, output of ncclras, NCCL's logs, stacks of py-spy and faulthandler, TORCH_TRACE folders,
    logs of torchrun and Slurm. Nothing in them is executed, and torch is not needed.

    Printed are the likely cause and how certain it is, who waits for whom, where ranks diverge, how
    far each group has come, and what the files cannot say. If no rank waits, it says which rank the
    others waited for.
    """
    if output is not None:
        check_distinct(output, files)
        check_output(output, force=force)
    with show_progress("explaining") as report:
        recording = explain_hang(files, report)
    recording = _name_command(recording)
    print_out(render_summary(recording))
    saved = [] if output is None else [save(recording, output, force=force)]
    add_recording(recording, saved)
    for path in saved:
        print_saved(path)
    ctx.exit(exit_code(recording, is_strict=strict))


def _name_command(recording: Recording) -> Recording:
    """The recording with this command and our version."""
    command_line = shlex.join(["shardscope", *sys.argv[1:]])
    run = replace(recording.run, command=command_line, shardscope_version=__version__)
    return replace(recording, run=run)
