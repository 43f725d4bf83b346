"""`shardscope trace`: record a training step of the user's program."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import click

from shardscope.cli.build_model import (
    BuiltModel,
    Report,
    build_model,
    choose_device,
    explain_failure,
)
from shardscope.cli.console import (
    exit_code,
    is_first,
    is_launched,
    launched_rank,
    print_error,
    print_traceback,
    show_progress,
)
from shardscope.cli.destination import Destination, check_rank_in_name, print_saved
from shardscope.cli.mesh_option import choose_axes
from shardscope.cli.program import LaunchedProgram, program_options
from shardscope.cli.shared_options import (
    by_option,
    data_option,
    device_option,
    force_option,
    mesh_option,
    output_option,
    rank_option,
    strict_option,
)
from shardscope.cli.target import Program, isolated_argv, load_program, name_command, name_target
from shardscope.cli.verb import FINDINGS_FAIL, Verb
from shardscope.comm.findings import review
from shardscope.comm.trace import Trace, trace
from shardscope.errors import OutputError
from shardscope.record import Recording, check_output
from shardscope.record.files import name_for_rank
from shardscope.report.text.summary import View, render_summary

__frames__ = "outermost"  # our callers are not the user's program


@dataclass(frozen=True)
class TracedStep:
    """What came of a step: its recording, and, if the program failed, how, in a sentence."""

    recording: Recording
    failure: str | None = None
    error: BaseException | None = None


def trace_step(
    program: Program,
    axes: Mapping[str, int] | None,
    *,
    rank: int,
    is_real: bool | None = None,
    has_data: bool = False,
    device: str | None = None,
    stream: str | None = None,
    force: bool = False,
    report: Report = lambda _: None,
) -> TracedStep:
    """Run a step as the rank that this process was started as, or in a simulated world.

    With `stream`, each collective is also written to that file before it is issued.
    """
    with build_model(
        program,
        axes,
        rank=rank,
        is_real=is_real,
        has_data=has_data,
        device=choose_device(device, has_data=has_data),
        report=report,
    ) as built:
        return _run(built, trace(built.model, mesh=built.mesh, stream=stream, force=force), report)


def _run(built: BuiltModel, traced: Trace, report: Report) -> TracedStep:
    program, model = built.program, built.model
    batch = built.make_batch()
    report("running a step")
    try:
        with traced:
            program.step(model, batch)
    except OutputError:
        raise  # the stream cannot be written, which is not the program's failure
    except KeyboardInterrupt as error:
        return TracedStep(traced.recording, "interrupted", error)
    except BaseException as error:  # noqa: BLE001 - a program may raise anything, and sys.exit()
        failure = explain_failure(program, "step()", error, has_data=built.has_data)
        return TracedStep(traced.recording, failure, error)
    return TracedStep(traced.recording)


@click.command(
    "trace",
    cls=Verb,
    examples=[
        "shardscope trace train.py --mesh dp=8,tp=4",
        "shardscope trace train.py --mesh tp=8 -o step.json.gz --by cause",
        "torchrun --nproc-per-node 8 --no-python shardscope trace train.py",
        "shardscope trace --nnodes 16 -- pretrain.py --its own arguments",
    ],
    fails_if=FINDINGS_FAIL,
    takes_program=True,
)
@click.argument("target", metavar="TARGET", required=False)
@program_options(
    "num_nodes", "num_per_node", "ranks", "steps", target_only=("mesh", "rank", "device", "stream")
)
@mesh_option
@rank_option
@data_option
@device_option
@output_option
@click.option(
    "--stream",
    metavar="FILE",
    help="Also write each collective to FILE (.jsonl) before it is issued, so that a run that "
    "hangs or is killed leaves a recording; {rank} in the name becomes the rank.",
)
@force_option
@by_option
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
    output: str | None,
    stream: str | None,
    force: bool,
    by: View,
    strict: bool,
) -> None:
    """Record one step of TARGET and print what it communicates.

    TARGET is a file (train.py) or a module (package.train) that defines model() and
    batch(model), and optionally parallelize(model, mesh) and step(model, batch).
    With --mesh the step runs in this process as one rank of a simulated world, on tensors without
    data. Started by torchrun it runs on real ranks, and each rank saves a recording.

    Instead of TARGET, an unmodified training program may follow --: see shardscope run.
    """
    if program is not None:
        ctx.exit(
            program.observe(
                "trace",
                lambda recording: [render_summary(recording, by=by)],
                output=output,
                force=force,
                strict=strict,
                data=data,
            )
        )
    # Check the command before running the program, which may take long.
    axes = choose_axes(target, mesh, verb="trace")
    destination = Destination(name_target(target), output, rank=rank, force=force)
    writer = launched_rank() if is_launched() else rank
    if stream is not None:
        check_rank_in_name(stream, example="--stream run-{rank}.jsonl")
        stream = os.path.abspath(stream)  # the target may change the working directory
        check_output(name_for_rank(stream, writer), force=force)
    run_step = partial(
        trace_step, axes=axes, rank=rank, has_data=data, device=device, stream=stream, force=force
    )
    traced_step = _trace_target(target, run_step)
    recording = review(name_command(traced_step.recording))
    destination.finish(recording, render_summary(recording, by=by))
    if stream is not None and is_first():
        print_saved(os.path.relpath(name_for_rank(stream, writer)))
    ctx.exit(_outcome(ctx, traced_step, recording, strict))


def _trace_target(target: str, run_step: Callable[..., TracedStep]) -> TracedStep:
    with (
        isolated_argv(target),
        show_progress(f"tracing {name_target(target)}", is_shown=is_first()) as report,
    ):
        return run_step(load_program(target), report=report)


def _outcome(
    ctx: click.Context, traced_step: TracedStep, recording: Recording, strict: bool
) -> int:
    if traced_step.failure is None:
        return exit_code(recording, is_strict=strict)
    if ctx.find_root().params.get("debug") and traced_step.error is not None:
        print_traceback(traced_step.error)
    print_error(traced_step.failure)
    return 2
