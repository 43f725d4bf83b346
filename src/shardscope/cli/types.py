"""`shardscope types`: infers how every tensor of the user's parallel model is distributed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

from shardscope.cli.build_model import build_alone
from shardscope.cli.console import exit_code, show_progress
from shardscope.cli.destination import Destination, save_file
from shardscope.cli.mesh_option import parse_mesh
from shardscope.cli.parity import explain_failures
from shardscope.cli.shared_options import (
    batch_axis_option,
    batch_dim_option,
    force_option,
    no_fold_option,
    output_option,
    seed_option,
    small_mesh_option,
    strict_option,
)
from shardscope.cli.target import (
    isolated_argv,
    load_program,
    name_command,
    name_target,
    run_default_step,
)
from shardscope.cli.verb import Verb
from shardscope.errors import TargetError
from shardscope.parallel.inferred_types import infer_types
from shardscope.record import Recording, check_output
from shardscope.report.export.spmd_types import render_spmd_types
from shardscope.report.text.summary import render_summary

__frames__ = "outermost"  # our callers are not the user's program


@click.command(
    "types",
    cls=Verb,
    examples=[
        "shardscope types train.py --mesh tp=2",
        "shardscope types train.py --mesh dp=2,tp=2 --batch-axis dp --no-fold",
        "shardscope types train.py --mesh tp=2 --assertions train_types.py",
    ],
    fails_if="A type contradicts how the tensor is used, or, with --strict, there is a gap, such "
    "as a tensor whose values do not decide.",
)
@click.argument("target", metavar="TARGET")
@small_mesh_option
@batch_axis_option
@batch_dim_option
@click.option(
    "--runs",
    type=click.IntRange(min=1),
    default=3,
    show_default=True,
    help="Sets of weights and inputs that a type must hold for; the first is the model's own.",
)
@click.option(
    "--assertions",
    metavar="OUT",
    show_default="none",
    help="Also save a Python module that asserts the types with the package spmd_types.",
)
@seed_option
@no_fold_option
@output_option
@force_option
@strict_option
@click.pass_context
def command(
    ctx: click.Context,
    target: str,
    mesh: str,
    batch_axes: tuple[str, ...],
    batch_dim: int,
    runs: int,
    assertions: str | None,
    seed: int,
    no_fold: bool,
    output: str | None,
    force: bool,
    strict: bool,
) -> None:
    """Infer how every tensor of TARGET's parallel model is distributed along each mesh axis.

    TARGET is a file (train.py) or a module (package.train) that defines model(), batch(model) and
    parallelize(model, mesh), and optionally step(model, batch), or train_step(model, batch,
    optimizer) and optimizer(model). All ranks of the mesh run as threads of this process, with
    several sets of weights and inputs.

    For the inputs and outputs of every module, for parameters and buffers, and for their gradients
    it prints R (replicated), S(d) (sharded along dim d), P (partial: the sum over ranks is the
    value), V (varying: no layout of the ranks' values is the single device's) or ? (the values do
    not decide).
    """
    axes = parse_mesh(mesh)
    destination = Destination(name_target(target), output, force=force)
    if assertions is not None:
        check_output(assertions, force=force)
    recording = _infer(
        target, axes, batch_axes=batch_axes, batch_dim=batch_dim, num_runs=runs, seed=seed
    )
    destination.finish(recording, render_summary(recording, is_folded=not no_fold))
    if assertions is not None:
        save_file(render_spmd_types(recording), assertions, force=force)
    ctx.exit(exit_code(recording, is_strict=strict))


def _infer(target: str, axes: Mapping[str, int], *, seed: int, **options: Any) -> Recording:
    with isolated_argv(target), show_progress(f"running {name_target(target)}") as report:
        program = load_program(target)
        is_training = program.train_step is not None or program.parallel_train_step is not None
        if program.parallelize is None and not is_training:
            raise TargetError(
                f"{program.name} defines no parallelize(model, mesh), so there is no parallel "
                "model whose tensors could be distributed. Define it."
            )
        model, batch = build_alone(program, report, seed=seed)
        with explain_failures(program):
            recording = infer_types(
                model,
                axes,
                inputs=batch,
                parallelize=program.parallelize,
                step=None if is_training or program.step is run_default_step else program.step,
                train_step=program.train_step,
                parallel_train_step=program.parallel_train_step,
                optimizer=program.optimizer if is_training else None,
                seed=seed,
                report=report,
                **options,
            )
    return name_command(recording)
