"""`shardscope coverage`: which ops of the user's model can run sharded, and what blocks others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import click
from msgspec.structs import replace

from shardscope.cli.build_model import build_model, choose_device, user_code
from shardscope.cli.console import exit_code, show_progress
from shardscope.cli.destination import Destination, save_file
from shardscope.cli.mesh_option import parse_mesh
from shardscope.cli.program import LaunchedProgram, print_failures, program_options
from shardscope.cli.shared_options import (
    device_option,
    force_option,
    output_option,
    small_mesh_option,
    strict_option,
)
from shardscope.cli.target import isolated_argv, load_program, name_command, name_target
from shardscope.cli.verb import FINDINGS_FAIL, Verb
from shardscope.launch.api import COVERAGE
from shardscope.record import Level, Recording, check_output
from shardscope.report.export.csv import render_coverage_csv
from shardscope.report.text.summary import render_summary
from shardscope.shard.coverage.coverage import cover_step

__frames__ = "outermost"  # our callers are not the user's program


@click.command(
    "coverage",
    cls=Verb,
    examples=[
        "shardscope coverage train.py --mesh tp=4",
        "shardscope coverage train.py --level core_aten --csv ops.csv",
        "shardscope coverage --nproc-per-node 4 -- pretrain.py",
    ],
    fails_if=FINDINGS_FAIL,
    takes_program=True,
)
@click.argument("target", metavar="TARGET", required=False)
@program_options("num_nodes", "num_per_node", target_only=("mesh", "data", "device"))
@small_mesh_option
@click.option(
    "--level",
    "levels",
    type=click.Choice([level.value for level in Level]),
    multiple=True,
    show_default="all levels, the first in full",
    help="How far to decompose ops; may be repeated.",
)
@click.option("--data", is_flag=True, help="Build the model with data, if it reads values.")
@device_option
@output_option
@click.option("--csv", "csv_output", metavar="CSV", help="Also save the table of ops as CSV.")
@force_option
@strict_option
@click.pass_context
def command(
    ctx: click.Context,
    target: str,
    program: LaunchedProgram | None,
    mesh: str,
    levels: tuple[str, ...],
    data: bool,
    device: str | None,
    output: str | None,
    csv_output: str | None,
    force: bool,
    strict: bool,
) -> None:
    """Find which ops of TARGET's model can run sharded, forward and backward.

    TARGET is a file (train.py) or a module (package.train) that defines model() and
    batch(model). If it defines parallelize(model, mesh), each op is tested at the placements
    that it has there; otherwise with each dim of each input sharded in turn.

    Instead of TARGET, an unmodified training program may follow --: see shardscope run. The ops of
    its model are tested on the inputs of its first training call, as the program has sharded it.
    """
    axes = parse_mesh(mesh)
    name = name_target(target) if program is None else program.name
    destination = Destination(name, output, force=force)
    if csv_output is not None:
        check_output(csv_output, force=force)
    chosen = levels or tuple(Level)
    failed = 0
    if program is None:
        recording = _cover(target, axes, levels=chosen, has_data=data, device=device)
    else:
        result = program.run(instruments=(COVERAGE,))
        failed = print_failures(result)
        if not result.has_recording:
            ctx.exit(failed)
        recording = _choose_levels(result.recording, chosen)
    destination.finish(recording, render_summary(recording))
    if csv_output is not None:
        save_file([render_coverage_csv(recording)], csv_output, force=force)
    ctx.exit(failed or exit_code(recording, is_strict=strict))


def _choose_levels(recording: Recording, levels: Sequence[str]) -> Recording:
    coverage = tuple(table for table in recording.coverage if table.level in levels)
    return replace(recording, coverage=coverage)


def _cover(
    target: str,
    axes: Mapping[str, int],
    *,
    levels: tuple[str, ...],
    has_data: bool,
    device: str | None,
) -> Recording:
    with (
        isolated_argv(target),
        show_progress(f"testing the ops of {name_target(target)}") as report,
    ):
        program = load_program(target)
        with build_model(
            program,
            axes,
            rank=0,
            is_real=False,
            has_data=has_data,
            device=choose_device(device, has_data=has_data),
            is_materialized=False,
            report=report,
        ) as built:
            batch = built.make_batch()
            with user_code(program, "step()", has_data=has_data):
                recording = cover_step(
                    built.model,
                    program.step,
                    batch,
                    mesh=built.mesh,
                    levels=levels,
                    report=report,
                )
    return name_command(recording)
