"""`shardscope trace`: record a training step of the user's program."""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from pathlib import Path

import click

from shardscope.cli.console import exit_code, print_line, print_out, show_progress
from shardscope.cli.launch import is_first, is_launched, launched_rank, num_launched
from shardscope.cli.mesh import parse_mesh
from shardscope.cli.options import by_option, force_option, strict_option
from shardscope.cli.own_names import check_own_name, save_under_own_name
from shardscope.cli.rehearsal import Rehearsal, rehearse_real, rehearse_simulated
from shardscope.cli.surroundings import as_if_started, name_command
from shardscope.cli.target import load_program, name_target
from shardscope.comm.review import review
from shardscope.comm.watch import name_for_rank
from shardscope.errors import OutputError, TargetError
from shardscope.record import Recording, check_output, save
from shardscope.report.names import make_inert
from shardscope.report.text import View, render_summary

__all__ = ["command"]


@click.command("trace")
@click.argument("target", metavar="TARGET")
@click.option("--mesh", metavar="AXES", help="Axes of the mesh, such as dp=8,tp=4.")
@click.option("--rank", type=int, default=0, show_default=True, help="Rank to simulate.")
@click.option("--data", is_flag=True, help="Simulate with real tensors (DDP needs them).")
@click.option(
    "-o",
    "--output",
    metavar="OUT",
    help="File to write (.json, .json.gz); {rank} in it becomes the rank.",
)
@force_option
@by_option
@strict_option
@click.pass_context
def command(
    ctx: click.Context,
    target: str,
    mesh: str | None,
    rank: int,
    data: bool,
    output: str | None,
    force: bool,
    by: View,
    strict: bool,
) -> None:
    """Record one step of TARGET and print what it communicates.

    TARGET is a file (train.py) or a module (package.train) that defines model() and
    batch(model), and optionally parallelize(model, mesh) and step(model, batch).
    With --mesh it runs in a simulated world, here, without data. Started by torchrun
    (torchrun --no-python shardscope trace …) it runs for real, and each rank writes a file.
    """
    # Whatever is wrong with the command is said before the program, which may take long, runs.
    axes = _choose_axes(target, mesh)
    path = _choose_path(output, rank)
    own_name = name_target(target) + (f"-{launched_rank()}" if is_launched() else "")
    if path is None:
        check_own_name(own_name)
    else:
        check_output(path, force=force)
    rehearsal = _rehearse(target, axes, rank=rank, has_data=data)
    recording = review(name_command(rehearsal.recording))
    try:
        if is_first():
            print_out(render_summary(recording, by=by))
    finally:  # what cannot be printed can still be saved, and the other way round
        saved = (
            save_under_own_name(recording, own_name)
            if path is None
            else save(recording, path, force=force)
        )
    if is_first():
        print_line()
        print_line(f"recording saved to {saved}")
    ctx.exit(_outcome(ctx, rehearsal, recording, strict))


def _choose_axes(target: str, mesh: str | None) -> dict[str, int] | None:
    if mesh is None and not is_launched():
        raise TargetError(
            f"There is no mesh to run {name_target(target)} on. Give one to simulate, such as "
            "--mesh dp=8,tp=4, or start the real thing with torchrun --no-python shardscope trace."
        )
    return None if mesh is None else parse_mesh(mesh)


def _choose_path(output: str | None, rank: int) -> Path | None:
    if output is None:
        return None
    if is_launched():
        rank = launched_rank()
        if "{rank}" not in output and num_launched() > 1:
            raise OutputError(
                f"all {num_launched()} processes would write '{output}'. Put {{rank}} into the "
                "name, as in -o run-{rank}.json.gz, and each writes a file of its own."
            )
    return name_for_rank(output, rank)


def _rehearse(
    target: str, axes: Mapping[str, int] | None, *, rank: int, has_data: bool
) -> Rehearsal:
    with (
        as_if_started(target),
        show_progress(f"tracing {name_target(target)}", is_shown=is_first()) as report,
    ):
        program = load_program(target)
        if is_launched():
            return rehearse_real(program, axes, report=report)
        assert axes is not None
        return rehearse_simulated(program, axes, rank=rank, has_data=has_data, report=report)


def _outcome(ctx: click.Context, rehearsal: Rehearsal, recording: Recording, strict: bool) -> int:
    if rehearsal.failure is None:
        return exit_code(recording, is_strict=strict)
    if ctx.find_root().params.get("debug") and rehearsal.error is not None:
        traceback.print_exception(rehearsal.error)
    click.echo(f"shardscope: {make_inert(rehearsal.failure)}", err=True)
    return 2
