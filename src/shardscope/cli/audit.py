"""`shardscope audit`: how the user's model is sharded, and what is wrong with its sharding."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import click

from shardscope.cli.build_model import BuiltModel, build_model, choose_device, explain_failure
from shardscope.cli.console import exit_code, is_first, print_error, show_progress
from shardscope.cli.destination import Destination
from shardscope.cli.mesh_option import choose_axes
from shardscope.cli.program import LaunchedProgram, program_options
from shardscope.cli.shared_options import (
    data_option,
    device_option,
    force_option,
    mesh_option,
    no_fold_option,
    output_option,
    rank_option,
    strict_option,
)
from shardscope.cli.target import isolated_argv, load_program, name_command, name_target
from shardscope.cli.verb import FINDINGS_FAIL, Verb
from shardscope.errors import TargetError
from shardscope.record import Recording
from shardscope.report.text.summary import render_summary
from shardscope.shard.audit.audit import audit

__frames__ = "outermost"  # our callers are not the user's program


@click.command(
    "audit",
    cls=Verb,
    examples=[
        "shardscope audit train.py --mesh dp=8,tp=4",
        "shardscope audit train.py --mesh tp=8 --no-step --no-fold",
        "shardscope audit --nnodes 16 -- pretrain.py",
    ],
    fails_if=FINDINGS_FAIL,
    takes_program=True,
)
@click.argument("target", metavar="TARGET", required=False)
@program_options(
    "num_nodes", "num_per_node", "ranks", target_only=("mesh", "rank", "device", "no_step")
)
@mesh_option
@rank_option
@data_option
@device_option
@click.option("--no-step", is_flag=True, help="Inspect the model without running a step.")
@no_fold_option
@output_option
@force_option
@strict_option
@click.pass_context
def command(
    ctx: click.Context,
    target: str,
    program: LaunchedProgram | None,
    mesh: str | None,
    rank: int,
    data: bool,
    device: str | None,
    no_step: bool,
    no_fold: bool,
    output: str | None,
    force: bool,
    strict: bool,
) -> None:
    """Show how TARGET's model is sharded, and what is wrong with its sharding.

    TARGET is as for trace; it may also define plan, the dict that it passes to parallelize_module.
    A step is run to find ops that mix plain tensors with DTensors.

    Instead of TARGET, an unmodified training program may follow --: see shardscope run. Its model
    is inspected when it is first called, and no step is run.
    """
    if program is not None:
        ctx.exit(
            program.observe(
                "audit",
                lambda recording: [render_summary(recording, is_folded=not no_fold)],
                output=output,
                force=force,
                strict=strict,
                data=data,
            )
        )
    axes = choose_axes(target, mesh, verb="audit")
    destination = Destination(name_target(target), output, rank=rank, force=force)
    audited, failure = _audit(
        target, axes, rank=rank, has_data=data, device=device, has_step=not no_step
    )
    recording = name_command(audited)
    destination.finish(recording, render_summary(recording, is_folded=not no_fold))
    if failure is not None:
        print_error(failure)
    ctx.exit(exit_code(recording, is_strict=strict) if failure is None else 2)


def _audit(
    target: str,
    axes: Mapping[str, int] | None,
    *,
    rank: int,
    has_data: bool,
    device: str | None,
    has_step: bool,
) -> tuple[Recording, str | None]:
    """The audit, and, if the program's step failed, how, in a sentence."""
    before: list[Recording] = []
    failures: list[str] = []
    with (
        isolated_argv(target),
        show_progress(f"auditing {name_target(target)}", is_shown=is_first()) as report,
    ):
        program = load_program(target)
        with build_model(
            program,
            axes,
            rank=rank,
            has_data=has_data,
            device=choose_device(device, has_data=has_data),
            report=report,
            inspect=lambda model: before.append(audit(model)),
        ) as built:
            step = _make_step(built, failures) if has_step else None
            report("inspecting the model")
            recording = audit(built.model, plan=program.plan, before=before[0], step=step)
    return recording, failures[0] if failures else None


def _make_step(built: BuiltModel, failures: list[str]) -> Callable[[], None]:
    batch = built.make_batch()

    def step() -> None:
        try:
            built.program.step(built.model, batch)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # a program may also call sys.exit()
            explained = explain_failure(built.program, "step()", error, has_data=built.has_data)
            failures.append(explained)
            raise TargetError(explained) from error

    return step
