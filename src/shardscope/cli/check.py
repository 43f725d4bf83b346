"""`shardscope check`: whether the ranks of a training program would hang, before it is launched."""

from __future__ import annotations

import math
from collections.abc import Sequence

import click

from shardscope.checks import check
from shardscope.cli.console import exit_code, show_progress
from shardscope.cli.destination import Destination
from shardscope.cli.mesh_option import parse_mesh
from shardscope.cli.program import LaunchedProgram, program_options
from shardscope.cli.shared_options import (
    force_option,
    output_option,
    strict_option,
)
from shardscope.cli.target import check_file, name_command, name_target
from shardscope.cli.target_program import BATCH_AXES
from shardscope.cli.verb import FINDINGS_FAIL, Verb
from shardscope.launch.program import Program
from shardscope.launch.request import Event, StepsEnded
from shardscope.record import Recording
from shardscope.report.text.summary import render_summary

_PER_NODE = 8  # ranks of a TARGET's mesh that share a node, if they divide evenly


@click.command(
    "check",
    cls=Verb,
    examples=[
        "shardscope check --nproc-per-node 4 -- train.py --lr 3e-4",
        "shardscope check --nnodes 2048 -- pretrain.py",
        "shardscope check train.py --mesh dp=2,tp=2",
    ],
    fails_if=FINDINGS_FAIL,
    takes_program=True,
)
@click.argument("target", metavar="TARGET", required=False)
@program_options("num_nodes", "num_per_node", "gpu", target_only=("mesh", "batch_axes"))
@click.option("--mesh", metavar="AXES", default="dp=2", show_default=True, help="Of a TARGET.")
@click.option(
    "--batch-axis",
    "batch_axes",
    multiple=True,
    metavar="AXIS",
    show_default=", ".join(BATCH_AXES),
    help="Mesh axis of a TARGET over which the batch is split; repeatable.",
)
@click.option(
    "--steps",
    type=click.IntRange(min=1),
    show_default="to the end of small programs",
    help="Training steps after which the program is ended.",
)
@click.option(
    "--data/--no-data",
    default=None,
    show_default="with data if there are few ranks that compute little",
    help="Run all ranks with data on this machine, or one of each role without.",
)
@click.option(
    "--variations/--no-variations",
    "is_varied",
    default=True,
    show_default=True,
    help="Run the program again as if some ranks saw something else.",
)
@output_option
@force_option
@strict_option
@click.pass_context
def command(
    ctx: click.Context,
    /,
    program: LaunchedProgram | None,
    target: str | None,
    mesh: str,
    batch_axes: tuple[str, ...],
    steps: int | None,
    data: bool | None,
    is_varied: bool,
    output: str | None,
    force: bool,
    strict: bool,
) -> None:
    """Find out before launch whether the ranks of a program would wait for each other forever.

    Runs an unmodified training program (after --), or TARGET, as several ranks, without GPUs, and
    compares the collectives that they issue in each group. Then it runs them again as if some ranks
    saw something else where the program decides: another batch, no token for an expert, NaN in a
    loss, an exception, a later clock. Prints which ranks diverge, under which condition and where,
    and what was tried.
    """
    if program is None:
        assert target is not None
        program = _launch_target(target, mesh, batch_axes)
        name = name_target(target)
    else:
        name = program.name
    destination = Destination(name, output, force=force)
    recording = name_command(
        _check(program, steps=steps, data=data, is_varied=is_varied, name=name)
    )
    destination.finish(recording, render_summary(recording))
    ctx.exit(exit_code(recording, is_strict=strict))


def _launch_target(target: str, mesh: str, batch_axes: Sequence[str]) -> LaunchedProgram:
    """TARGET as a program, on a cluster with as many ranks as the mesh has."""
    axes = parse_mesh(mesh)
    check_file(target)
    size = math.prod(axes.values())
    per_node = size if size % _PER_NODE else _PER_NODE
    words = (target, mesh, ",".join(batch_axes or BATCH_AXES))
    return LaunchedProgram(
        Program("shardscope.cli.target_program", words, is_module=True),
        num_nodes=size // per_node,
        num_per_node=per_node,
    )


def _check(
    program: LaunchedProgram, *, steps: int | None, data: bool | None, is_varied: bool, name: str
) -> Recording:
    with show_progress(f"checking {name}") as report:

        def on_event(event: Event) -> None:
            done = f"step {event.num_steps}" if isinstance(event, StepsEnded) else "ended"
            report(f"rank {event.job.rank}: {done}")

        return check(
            program.program.script,
            *program.program.args,
            num_nodes=program.num_nodes,
            num_per_node=program.num_per_node,
            gpu=program.gpu,
            steps=steps,
            data=data,
            variations=is_varied,
            is_module=program.program.is_module,
            on_event=on_event,
        ).recording
