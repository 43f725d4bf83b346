"""`shardscope audit`: what sharding did to the user's model, and what is wrong with it."""

from __future__ import annotations

from collections.abc import Mapping

import click

from shardscope.cli.building import build_model
from shardscope.cli.console import exit_code, show_progress
from shardscope.cli.destination import Destination
from shardscope.cli.finish import finish
from shardscope.cli.launch import is_first
from shardscope.cli.mesh import choose_axes
from shardscope.cli.options import (
    data_option,
    force_option,
    mesh_option,
    no_fold_option,
    output_option,
    rank_option,
    strict_option,
)
from shardscope.cli.surroundings import as_if_started, name_command
from shardscope.cli.target import load_program, name_target
from shardscope.record import Recording
from shardscope.report.text import render_summary
from shardscope.shard.audit import audit

__all__ = ["command"]

__frames__ = "outermost"  # whoever called us did not write the program


@click.command("audit")
@click.argument("target", metavar="TARGET")
@mesh_option
@rank_option
@data_option
@click.option("--no-step", is_flag=True, help="Look at the model only; do not run a step.")
@no_fold_option
@output_option
@force_option
@strict_option
@click.pass_context
def command(
    ctx: click.Context,
    target: str,
    mesh: str | None,
    rank: int,
    data: bool,
    no_step: bool,
    no_fold: bool,
    output: str | None,
    force: bool,
    strict: bool,
) -> None:
    """Print what each rank holds of TARGET's model, and what is wrong with how it is sharded.

    TARGET is as for trace; it may also define plan, the dict that it gives to parallelize_module.
    A step is run to find plain tensors that meet DTensors. Exits with 1 if there is a finding.
    """
    axes = choose_axes(target, mesh, verb="audit")
    destination = Destination(target, output, rank=rank, force=force)
    found = _audit(target, axes, rank=rank, has_data=data, has_step=not no_step)
    recording = name_command(found)
    finish(recording, destination, render_summary(recording, is_folded=not no_fold))
    ctx.exit(exit_code(recording, is_strict=strict))


def _audit(
    target: str, axes: Mapping[str, int] | None, *, rank: int, has_data: bool, has_step: bool
) -> Recording:
    before: list[Recording] = []
    with (
        as_if_started(target),
        show_progress(f"auditing {name_target(target)}", is_shown=is_first()) as report,
    ):
        program = load_program(target)
        with build_model(
            program,
            axes,
            rank=rank,
            has_data=has_data,
            report=report,
            inspect=lambda model: before.append(audit(model)),
        ) as built:
            model, batch = built.model, built.make_batch() if has_step else None
            report("looking at the model")
            return audit(
                model,
                plan=program.plan,
                before=before[0],
                step=(lambda: program.step(model, batch)) if has_step else None,
            )
