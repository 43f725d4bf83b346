"""`shardscope parity`: does the user's parallel model compute what the single device does?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import click
import torch

from shardscope.cli.building import build_alone
from shardscope.cli.console import exit_code, print_out, show_progress
from shardscope.cli.failure import describe_failure, suggest_remedy
from shardscope.cli.finish import save_if_asked
from shardscope.cli.mesh import parse_mesh
from shardscope.cli.options import force_option, recording_option, seed_option, strict_option
from shardscope.cli.surroundings import as_if_started, name_command
from shardscope.cli.target import Program, load_program, name_target, run_default_step
from shardscope.errors import ParityError, RankError, ShardscopeError, TargetError
from shardscope.parallel.parity.check import parity
from shardscope.record import Recording, check_output
from shardscope.report.text import render_summary

__all__ = ["command"]

__frames__ = "outermost"  # whoever called us did not write the program

_PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@click.command("parity")
@click.argument("target", metavar="TARGET")
@click.option(
    "--mesh",
    metavar="AXES",
    default="tp=2",
    show_default=True,
    help="Axes of the mesh and their sizes, for example dp=2,tp=2.",
)
@click.option(
    "--processes",
    is_flag=True,
    help="Run each rank in a process of its own (gloo), not in a thread.",
)
@click.option(
    "--batch-axis",
    "batch_axes",
    metavar="AXIS",
    multiple=True,
    help="Axis along which the batch is sharded; may be repeated. [default: none, every rank has "
    "the whole batch]",
)
@click.option(
    "--precision",
    type=click.Choice(list(_PRECISIONS)),
    help="Lowest precision that the parallel model may compute in. [default: the model's own]",
)
@seed_option
@recording_option
@force_option
@strict_option
@click.pass_context
def command(
    ctx: click.Context,
    target: str,
    mesh: str,
    processes: bool,
    batch_axes: tuple[str, ...],
    precision: str | None,
    seed: int,
    output: str | None,
    force: bool,
    strict: bool,
) -> None:
    """Compare TARGET's parallel model with the single device: outputs, gradients, buffers.

    TARGET is a file (train.py) or a module (package.train) that defines model(), batch(model) and
    parallelize(model, mesh), or a plan, and optionally step(model, batch). All ranks of the mesh
    run in this process. If tensors differ, the exit code is 1, and the code where the two versions
    diverge is printed with the likely cause.

    Example: shardscope parity train.py --mesh dp=2,tp=2 --batch-axis dp
    """
    axes = parse_mesh(mesh)
    if output is not None:
        check_output(output, force=force)
    recording = _check(
        target,
        axes,
        is_in_processes=processes,
        batch_axes=batch_axes,
        precision=None if precision is None else _PRECISIONS[precision],
        seed=seed,
    )
    print_out(render_summary(recording))
    save_if_asked(recording, output, force=force)
    ctx.exit(exit_code(recording, is_strict=strict))


def _check(
    target: str, axes: Mapping[str, int], *, is_in_processes: bool, seed: int, **options: Any
) -> Recording:
    with as_if_started(target), show_progress(f"checking {name_target(target)}") as report:
        program = load_program(target)
        if program.parallelize is None and program.plan is None:
            raise TargetError(
                f"{program.name} defines neither parallelize(model, mesh) nor a plan, so there is "
                "no parallel model to compare. Define one of them."
            )
        model, batch = build_alone(program, report, seed=seed)
        with _explained(program):
            recording = parity(
                model,
                axes,
                program.plan,
                inputs=batch,
                parallelize=program.parallelize,
                step=None if program.step is run_default_step else program.step,
                processes=is_in_processes,
                seed=seed,
                report=report,
                **options,
            )
    return name_command(recording)


@contextmanager
def _explained(program: Program) -> Iterator[None]:
    """Name the line of the program where a rank failed, or the original."""
    try:
        yield
    except (RankError, ParityError) as error:
        cause = error.__cause__
        if cause is None or isinstance(cause, ShardscopeError):
            raise
        who = f"on rank {error.rank}" if isinstance(error, RankError) else "on a single device"
        fact = f"{program.name}'s model failed {who}: {describe_failure(cause)}."
        raise TargetError(f"{fact} {suggest_remedy(cause, has_data=True)}".rstrip()) from error
