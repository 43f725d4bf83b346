"""`shardscope check`: whether the ranks of a training program would hang, before it is launched."""

from __future__ import annotations

import click

from shardscope.check import check
from shardscope.cli.console import exit_code, show_progress
from shardscope.cli.destination import Destination
from shardscope.cli.program import LaunchedProgram, cluster_options, read_program
from shardscope.cli.shared_options import force_option, output_option, strict_option
from shardscope.cli.verb import FINDINGS_FAIL, Verb
from shardscope.launch.request import Event, JobEnded, StepsEnded
from shardscope.report.text.summary import render_summary


@click.command(
    "check",
    cls=Verb,
    context_settings={"allow_interspersed_args": False, "ignore_unknown_options": False},
    examples=[
        "shardscope check --nproc-per-node 4 -- train.py --lr 3e-4",
        "shardscope check --nnodes 2048 -- pretrain.py",
    ],
    fails_if=FINDINGS_FAIL,
)
@click.argument("program", nargs=-1, required=True, type=click.UNPROCESSED)
@click.option("-m", "is_module", is_flag=True, help="PROGRAM is a module, as for python -m.")
@cluster_options("num_nodes", "num_per_node", "gpu")
@click.option(
    "--steps",
    type=int,
    default=None,
    show_default="enough to compare",
    help="Training steps to run at most.",
)
@click.option(
    "--data/--no-data",
    default=None,
    show_default="with data if it computes little",
    help="Run all ranks with data, or one of each role without.",
)
@output_option
@force_option
@strict_option
@click.pass_context
def command(
    ctx: click.Context,
    /,
    program: tuple[str, ...],
    is_module: bool,
    num_nodes: int,
    num_per_node: int,
    gpu: str,
    steps: int | None,
    data: bool | None,
    output: str | None,
    force: bool,
    strict: bool,
) -> None:
    """Find out before launch whether ranks of PROGRAM would wait for each other forever.

    Runs PROGRAM, an unmodified training script, as several ranks without GPUs, and compares the
    collectives that they issue in each group.
    """
    launched = LaunchedProgram(read_program(program, is_module=is_module))
    destination = Destination(launched.name, output, force=force)
    with show_progress(f"checking {launched.program.script}") as report:

        def on_event(event: Event) -> None:
            if isinstance(event, StepsEnded):
                report(f"rank {event.job.rank}: step {event.num_steps}")
            elif isinstance(event, JobEnded):
                report(f"rank {event.job.rank}: ended")

        result = check(
            launched.program.script,
            *launched.program.args,
            num_nodes=num_nodes,
            num_per_node=num_per_node,
            gpu=gpu,
            steps=steps,
            data=data,
            is_module=launched.program.is_module,
            on_event=on_event,
        )
    destination.finish(result.recording, render_summary(result.recording))
    ctx.exit(exit_code(result.recording, is_strict=strict))
