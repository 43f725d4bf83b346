"""`shardscope parity`: compares the user's parallel model with a single device."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import click
import torch

from shardscope.attribution.failures import describe_failure, suggest_remedy
from shardscope.cli.build_model import build_alone
from shardscope.cli.console import exit_code, show_progress
from shardscope.cli.destination import Destination
from shardscope.cli.mesh_option import parse_mesh
from shardscope.cli.program import LaunchedProgram, program_options
from shardscope.cli.shared_options import (
    batch_axis_option,
    batch_dim_option,
    force_option,
    output_option,
    seed_option,
    small_mesh_option,
    strict_option,
)
from shardscope.cli.target import (
    Program,
    isolated_argv,
    load_program,
    name_command,
    name_target,
    run_default_step,
)
from shardscope.cli.verb import Verb
from shardscope.errors import ParityError, RankError, ShardscopeError, TargetError
from shardscope.launch.parity import compare_program
from shardscope.parallel.parity import parity
from shardscope.record import Recording
from shardscope.report.text.summary import render_summary

__frames__ = "outermost"  # our callers are not the user's program

_PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@click.command(
    "parity",
    cls=Verb,
    examples=[
        "shardscope parity train.py --mesh tp=4",
        "shardscope parity train.py --mesh dp=2,tp=2 --batch-axis dp --precision bf16",
        "shardscope parity train.py --mesh cp=2 --batch-axis cp --batch-dim 1 --steps 3",
        "shardscope parity --nproc-per-node 4 -- pretrain.py --layers 2",
        'shardscope parity --nproc-per-node 4 --single-args "--tp 1" -- pretrain.py --tp 4',
    ],
    fails_if="An output, gradient or buffer differs, an output is too noisy to compare, nothing "
    "was compared, or, with --strict, there is a gap.",
    takes_program=True,
)
@click.argument("target", metavar="TARGET", required=False)
@program_options(
    "num_nodes",
    "num_per_node",
    target_only=("mesh", "processes", "batch_axes", "precision", "seed"),
)
@click.option(
    "--single-args",
    metavar="ARGS",
    default="",
    show_default="none",
    help="Arguments added to a program's own where it runs as a single process.",
)
@small_mesh_option
@click.option(
    "--processes", is_flag=True, help="Run the ranks as processes (gloo) instead of threads."
)
@batch_axis_option
@batch_dim_option
@click.option(
    "--steps",
    type=click.IntRange(min=1),
    default=2,
    show_default=True,
    help="Training steps to compare: of a program, or if TARGET defines train_step().",
)
@click.option(
    "--precision",
    type=click.Choice(list(_PRECISIONS)),
    show_default="the model's own",
    help="Lowest precision that the parallel model computes in.",
)
@seed_option
@output_option
@force_option
@strict_option
@click.pass_context
def command(
    ctx: click.Context,
    target: str,
    program: LaunchedProgram | None,
    single_args: str,
    mesh: str,
    processes: bool,
    batch_axes: tuple[str, ...],
    batch_dim: int,
    steps: int,
    precision: str | None,
    seed: int,
    output: str | None,
    force: bool,
    strict: bool,
) -> None:
    """Compare TARGET's parallel model with a single device: outputs, gradients, buffers.

    TARGET is a file (train.py) or a module (package.train) that defines model(), batch(model) and
    parallelize(model, mesh), or a plan, and optionally step(model, batch). All ranks of the mesh
    run as threads of this process, or, with --processes, as processes of their own. If tensors
    differ, the code where the two versions diverge is printed with the likely cause.

    If it defines train_step(model, batch, optimizer) and optimizer(model), entire training steps
    are compared: losses, gradients before and after clipping, their norm, the optimizer's state
    and the updated parameters. The ranks run parallel_train_step if there is one; a step with a
    fourth parameter gets the device mesh, which is None on the single device.

    A training program after -- runs as it is: all its ranks as processes of this machine, then a
    single process, which gets the weights of the ranks and the samples of all of them, and takes
    the same number of steps. Compared are losses, gradients, clipping, the optimizer's settings and
    state, and updated parameters; of the first step also what the model returns.
    """
    if program is not None:
        destination = Destination(program.name, output, force=force)
        recording = _compare_ranks(program, shlex.split(single_args), steps, batch_dim)
        destination.finish(recording, render_summary(recording))
        ctx.exit(exit_code(recording, is_strict=strict))
    if single_args:
        raise TargetError(
            "--single-args is for a program after --, and parity got a TARGET. Leave it out; a "
            "TARGET defines model(), which runs on a single device."
        )
    axes = parse_mesh(mesh)
    destination = Destination(name_target(target), output, force=force)
    recording = _check(
        target,
        axes,
        is_in_processes=processes,
        batch_axes=batch_axes,
        batch_dim=batch_dim,
        steps=steps,
        precision=None if precision is None else _PRECISIONS[precision],
        seed=seed,
    )
    destination.finish(recording, render_summary(recording))
    ctx.exit(exit_code(recording, is_strict=strict))


def _compare_ranks(
    program: LaunchedProgram, single_args: Sequence[str], steps: int, batch_dim: int
) -> Recording:
    """Compare the ranks of a program with a single process, and show which processes have ended."""
    with show_progress(f"comparing {program.program.script}") as report:
        return compare_program(
            program.program,
            num_nodes=program.num_nodes,
            num_per_node=program.num_per_node,
            single_args=single_args,
            num_steps=steps,
            batch_dim=batch_dim,
            on_event=lambda event: report(f"rank {event.job.rank}, {event.job.instrument}"),
        )


def _check(
    target: str, axes: Mapping[str, int], *, is_in_processes: bool, seed: int, **options: Any
) -> Recording:
    with isolated_argv(target), show_progress(f"checking {name_target(target)}") as report:
        program = load_program(target)
        is_training = program.train_step is not None or program.parallel_train_step is not None
        if program.parallelize is None and program.plan is None and not is_training:
            raise TargetError(
                f"{program.name} defines neither parallelize(model, mesh) nor a plan, so there is "
                "no parallel model to compare. Define one of them."
            )
        model, batch = build_alone(program, report, seed=seed)
        with explain_failures(program):
            recording = parity(
                model,
                axes,
                None if is_training else program.plan,
                inputs=batch,
                parallelize=program.parallelize,
                step=None if is_training or program.step is run_default_step else program.step,
                train_step=program.train_step,
                parallel_train_step=program.parallel_train_step,
                optimizer=program.optimizer if is_training else None,
                processes=is_in_processes,
                seed=seed,
                report=report,
                **options,
            )
    return name_command(recording)


@contextmanager
def explain_failures(program: Program) -> Iterator[None]:
    """Explain an error of a rank or of the single device, with the line of the program."""
    try:
        yield
    except (RankError, ParityError) as error:
        cause = error.__cause__
        if cause is None or isinstance(cause, ShardscopeError):
            raise
        where = f"on rank {error.rank}" if isinstance(error, RankError) else "on a single device"
        fact = f"{program.name}'s model failed {where}: {describe_failure(cause)}."
        raise TargetError(f"{fact} {suggest_remedy(cause, has_data=True)}".rstrip()) from error
