"""`shardscope trace`: record a training step of the user's program."""

from __future__ import annotations

import os
import traceback
from pathlib import Path

import click

from shardscope.cli.console import exit_code, open_console, show_progress
from shardscope.cli.rehearsal import (
    Rehearsal,
    is_launched,
    parse_mesh,
    rehearse_real,
    rehearse_simulated,
)
from shardscope.cli.target import Program, load_program
from shardscope.comm.review import review
from shardscope.errors import TargetError
from shardscope.record import Recording, check_output, save
from shardscope.report.text import View, render_summary

__all__ = ["command"]


@click.command("trace")
@click.argument("target", metavar="TARGET")
@click.option("--mesh", metavar="AXES", help="Axes of the mesh, such as dp=8,tp=4.")
@click.option("--rank", type=int, default=0, show_default=True, help="Rank to simulate.")
@click.option("--data", is_flag=True, help="Simulate with real tensors (DDP needs them).")
@click.option("-o", "--output", metavar="OUT", help="File to write (.json, .json.gz).")
@click.option("--force", is_flag=True, help="Overwrite OUT.")
@click.option(
    "--by",
    type=click.Choice(["module", "axis", "kind", "cause"]),
    default="module",
    show_default=True,
    help="What to sort collectives by.",
)
@click.option("--strict", is_flag=True, help="Exit with 1 if the recording has gaps.")
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
    program = load_program(target)
    axes = None if mesh is None else parse_mesh(mesh)
    path = output or _default_path(program)
    check_output(path, force=force)
    if is_launched():
        with show_progress(f"tracing {program.name}", is_shown=_is_first()) as report:
            rehearsal = rehearse_real(program, axes, report=report)
    elif axes is None:
        raise TargetError(
            f"There is no mesh to run {program.name} on. Give one to simulate, such as "
            "--mesh dp=8,tp=4, or start the real thing with torchrun --no-python shardscope trace."
        )
    else:
        with show_progress(f"tracing {program.name}") as report:
            rehearsal = rehearse_simulated(program, axes, rank=rank, has_data=data, report=report)
    recording = review(rehearsal.recording)
    save(recording, path, force=force)
    if _is_first():
        console = open_console()
        console.print(render_summary(recording, by=by))
        console.print(f"\nrecording saved to {path}", soft_wrap=True)
    ctx.exit(_outcome(ctx, program, rehearsal, recording, strict))


def _outcome(
    ctx: click.Context, program: Program, rehearsal: Rehearsal, recording: Recording, strict: bool
) -> int:
    if rehearsal.failure is None:
        return exit_code(recording, is_strict=strict)
    if ctx.find_root().params.get("debug") and rehearsal.error is not None:
        traceback.print_exception(rehearsal.error)
    click.echo(f"shardscope: {program.name}'s step() failed: {rehearsal.failure}", err=True)
    return 2


def _default_path(program: Program) -> str:
    suffix = f"-{os.environ['RANK']}" if is_launched() else ""
    return str(Path(f"{program.name}{suffix}.shardscope.json.gz"))


def _is_first() -> bool:
    return os.environ.get("RANK", "0") == "0"
