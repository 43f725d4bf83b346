"""`shardscope run`: an unmodified training program as any rank of a simulated cluster."""

from __future__ import annotations

import sys

import click

from shardscope.cli.console import exit_code, print_line, show_progress
from shardscope.cli.destination import Destination
from shardscope.cli.shared_options import by_option, force_option, output_option, strict_option
from shardscope.cli.verb import FINDINGS_FAIL, Verb
from shardscope.comm.findings import review
from shardscope.launch.api import GPU_NAMES, RunResult, run_until_interrupted
from shardscope.launch.program import Program
from shardscope.launch.request import Busy, Event, JobEnded, StepsEnded
from shardscope.record.text import sanitize_text
from shardscope.report.text.summary import View, render_summary


@click.command(
    "run",
    cls=Verb,
    context_settings={"allow_interspersed_args": False, "ignore_unknown_options": False},
    examples=[
        "shardscope run -- train.py --lr 3e-4",
        "shardscope run --nnodes 128 --ranks 0,1023 -- train.py",
        "shardscope run --nproc-per-node 4 -m package.train --config small",
    ],
    fails_if=FINDINGS_FAIL,
)
@click.argument("program", nargs=-1, required=True, type=click.UNPROCESSED)
@click.option("-m", "is_module", is_flag=True, help="PROGRAM is a module, as for python -m.")
@click.option(
    "--nnodes", "num_nodes", type=int, default=1, show_default=True, help="Number of nodes."
)
@click.option(
    "--nproc-per-node",
    "num_per_node",
    type=int,
    default=8,
    show_default=True,
    help="Processes per node, each with a GPU of its own.",
)
@click.option(
    "--ranks",
    default="0",
    show_default=True,
    metavar="RANKS",
    help="Ranks to run: 0,8-15, all, or roles (each pipeline stage, the last of each axis).",
)
@click.option(
    "--steps",
    type=int,
    default=2,
    show_default=True,
    help="Training steps after which the program is ended.",
)
@click.option(
    "--gpu",
    type=click.Choice(GPU_NAMES),
    default=GPU_NAMES[0],
    show_default=True,
    help="GPU to simulate.",
)
@click.option(
    "--real", is_flag=True, help="Start real ranks with torchrun on this machine, and trace them."
)
@output_option
@force_option
@by_option
@strict_option
@click.pass_context
def command(
    ctx: click.Context,
    program: tuple[str, ...],
    is_module: bool,
    num_nodes: int,
    num_per_node: int,
    ranks: str,
    steps: int,
    gpu: str,
    real: bool,
    output: str | None,
    force: bool,
    by: View,
    strict: bool,
) -> None:
    """Run PROGRAM, a training script as it is, as ranks of a cluster that is not there.

    Use it where you would write torchrun: the program sees the environment, process groups and GPUs
    of its rank. Nothing is sent, tensors on the GPU have no data, and the program is ended after a
    few training steps. What it communicated and how much memory it needs is printed and saved.
    """
    script, *args = program
    destination = Destination(Program(script, tuple(args), is_module).name, output, force=force)

    with show_progress(f"running {script}") as report:

        def on_event(event: Event) -> None:
            rank, instrument = event.job.rank, event.job.instrument
            if isinstance(event, StepsEnded):
                report(f"rank {rank}, {instrument}: step {event.num_steps} of {steps}")
            elif isinstance(event, JobEnded):
                report(f"rank {rank}, {instrument}: ended")
            elif instrument == "trace":  # the others run the same program
                click.echo(sanitize_text(_warn_of_computation(event)), err=True)

        result = run_until_interrupted(
            script,
            *args,
            num_nodes=num_nodes,
            num_per_node=num_per_node,
            ranks=ranks,
            steps=steps,
            gpu=gpu,
            is_module=is_module,
            real=real,
            on_event=on_event,
        )
    ctx.exit(_finish(result, destination, by=by, strict=strict))


def _finish(result: RunResult, destination: Destination, *, by: View, strict: bool) -> int:
    code = 0
    if result.has_recording:
        recording = review(result.recording)
        destination.finish(recording, render_summary(recording, by=by))
        print_line(f"next: shardscope report {destination.path}")
        code = exit_code(recording, is_strict=strict)
    for output in result.hidden_outputs:
        click.echo("\n".join(map(sanitize_text, output.splitlines())), err=True)
    for failure in result.failures:
        click.echo(f"shardscope: {sanitize_text(failure)}", err=True)
    sys.stderr.flush()
    if result.signal is not None:
        return 128 + result.signal  # as a shell reports a program that a signal has ended
    return 2 if result.failures else code


def _warn_of_computation(event: Busy) -> str:
    return (
        f"shardscope: rank {event.job.rank} has computed for {event.seconds} s without a training "
        f"step, and is at {event.place}. Press Ctrl-C to end it; what was recorded is kept."
    )
