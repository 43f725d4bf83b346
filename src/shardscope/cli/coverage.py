"""`shardscope coverage`: which ops of the user's model shard, and what blocks sharding first."""

from __future__ import annotations

from collections.abc import Mapping

import click

from shardscope.cli.building import build_model, theirs
from shardscope.cli.console import exit_code, print_line, print_out, show_progress
from shardscope.cli.finish import save_if_asked
from shardscope.cli.mesh import parse_mesh
from shardscope.cli.options import force_option, recording_option, strict_option
from shardscope.cli.surroundings import as_if_started, name_command
from shardscope.cli.target import load_program, name_target
from shardscope.record import Level, Recording, check_output, write_file
from shardscope.report.coverage import render_coverage_csv
from shardscope.report.text import render_summary
from shardscope.shard.coverage import cover_step

__all__ = ["command"]

__frames__ = "outermost"  # whoever called us did not write the program


@click.command("coverage")
@click.argument("target", metavar="TARGET")
@click.option("--mesh", metavar="AXES", default="tp=2", show_default=True, help="Axes of the mesh.")
@click.option(
    "--level",
    "levels",
    type=click.Choice([level.value for level in Level]),
    multiple=True,
    help="How far to take ops apart; may be repeated. [default: all levels, the first in full]",
)
@click.option("--data", is_flag=True, help="Build the model with data, if it looks at values.")
@recording_option
@click.option("--csv", "csv_output", metavar="CSV", help="Table of the ops to write.")
@force_option
@strict_option
@click.pass_context
def command(
    ctx: click.Context,
    target: str,
    mesh: str,
    levels: tuple[str, ...],
    data: bool,
    output: str | None,
    csv_output: str | None,
    force: bool,
    strict: bool,
) -> None:
    """Find which ops of TARGET's model shard, forwards and backwards.

    TARGET is a file (train.py) or a module (package.train) that defines model() and
    batch(model). If it defines parallelize(model, mesh), each op is judged at the placements
    it gives; else with each dim of each input sharded in turn.
    """
    axes = parse_mesh(mesh)
    for path in filter(None, (output, csv_output)):
        check_output(path, force=force)
    recording = _cover(target, axes, levels=levels or tuple(Level), has_data=data)
    print_out(render_summary(recording))
    save_if_asked(recording, output, force=force)
    if csv_output is not None:
        write_file([render_coverage_csv(recording)], csv_output, force=force)
        print_line()
        print_line(f"table written to {csv_output}")
    ctx.exit(exit_code(recording, is_strict=strict))


def _cover(
    target: str, axes: Mapping[str, int], *, levels: tuple[str, ...], has_data: bool
) -> Recording:
    with (
        as_if_started(target),
        show_progress(f"covering {name_target(target)}") as report,
    ):
        program = load_program(target)
        with build_model(
            program,
            axes,
            rank=0,
            is_real=False,
            has_data=has_data,
            is_materialized=False,
            report=report,
        ) as built:
            batch = built.make_batch()
            with theirs(program, "step()", has_data=has_data):
                recording = cover_step(
                    built.model,
                    program.step,
                    batch,
                    mesh=built.mesh,
                    levels=levels,
                    report=report,
                )
    return name_command(recording)
