"""`shardscope explain`: counts the graphs that torch.compile captures and says what breaks them."""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import click
import torch
from rich.console import RenderableType
from torch import nn

from shardscope._torch.dynamo_caches import quiet_compiler
from shardscope._torch.modules import is_compiled
from shardscope.cli.build_model import Report, build_model, explain_failure, user_code
from shardscope.cli.console import (
    exit_code,
    is_first,
    is_launched,
    print_error,
    show_progress,
)
from shardscope.cli.destination import Destination
from shardscope.cli.mesh_option import parse_mesh
from shardscope.cli.program import LaunchedProgram, program_options
from shardscope.cli.shared_options import force_option, mesh_option, output_option, strict_option
from shardscope.cli.target import Program, isolated_argv, load_program, name_command, name_target
from shardscope.cli.verb import FINDINGS_FAIL, Verb, suggest
from shardscope.compile.explain.explain import explaining, run_as_it_is
from shardscope.errors import TargetError
from shardscope.launch.api import COMPILE
from shardscope.record import Recording
from shardscope.report.text.compiler import render_guards, render_stage_times
from shardscope.report.text.style import shorten
from shardscope.report.text.summary import render_summary

__frames__ = "outermost"  # our callers are not the user's program


@dataclass(frozen=True)
class _Run:
    """The recording of a step; `failure` says why the step failed, if it did."""

    recording: Recording
    failure: str = ""
    error: BaseException | None = None


@click.command(
    "explain",
    cls=Verb,
    examples=[
        "shardscope explain train.py",
        "shardscope explain train.py --backend inductor --steps 3 --guards --times",
        "shardscope explain --steps 2 -- pretrain.py",
    ],
    fails_if=FINDINGS_FAIL,
    takes_program=True,
)
@click.argument("target", metavar="TARGET", required=False)
@program_options("num_nodes", "num_per_node", "ranks", target_only=("mesh", "backend", "guards"))
@mesh_option
@click.option(
    "--backend",
    metavar="NAME",
    show_default="run the captured graphs eagerly",
    help="Backend of torch.compile, for a TARGET that does not compile its model itself.",
)
@click.option(
    "--steps", type=click.IntRange(1), default=1, show_default=True, help="Number of steps to run."
)
@click.option("--guards", is_flag=True, help="Print the guards of each compiled frame.")
@click.option(
    "--times",
    is_flag=True,
    help="Print the time of each compiler stage; it varies from run to run.",
)
@output_option
@force_option
@strict_option
@click.pass_context
def command(
    ctx: click.Context,
    target: str,
    program: LaunchedProgram | None,
    mesh: str | None,
    backend: str | None,
    steps: int,
    guards: bool,
    times: bool,
    output: str | None,
    force: bool,
    strict: bool,
) -> None:
    """Count the graphs that torch.compile captures of TARGET's model, and say what breaks them.

    TARGET is a file (train.py) or a module (package.train) that defines model() and batch(model),
    and optionally step(model, batch). A model that TARGET does not compile itself is compiled
    here. With --mesh, parallelize(model, mesh) shards it first, in a simulated world. Started by
    torchrun it runs on real ranks; `shardscope show` of all their recordings compares the graphs.

    Instead of TARGET, an unmodified training program may follow --: see shardscope run. If it
    compiles nothing, its model is compiled on the inputs of its first call.
    """
    if program is not None:

        def render(recording: Recording) -> list[RenderableType]:
            details = render_stage_times(recording) if times else ()
            return [render_summary(recording), *details]

        ctx.exit(program.observe(COMPILE, render, output=output, force=force, strict=strict))
    axes = None if mesh is None else parse_mesh(mesh)
    _check_backend(backend)
    destination = Destination(name_target(target), output, force=force)
    run = _explain(target, axes, backend, num_steps=steps, has_guards=guards)
    recording = name_command(run.recording)
    destination.finish(
        recording,
        render_summary(recording),
        *(render_guards(recording) if guards else ()),
        *(render_stage_times(recording) if times else ()),
    )
    ctx.exit(_choose_exit_code(ctx, run, strict=strict))


def _choose_exit_code(ctx: click.Context, run: _Run, *, strict: bool) -> int:
    if not run.failure:
        return exit_code(run.recording, is_strict=strict)
    if ctx.find_root().params.get("debug") and run.error is not None:
        traceback.print_exception(run.error)
    print_error(run.failure)
    return 2


def _check_backend(backend: str | None) -> None:
    if backend is None:
        return
    known = torch.compiler.list_backends(exclude_tags=())
    if backend not in known:
        raise TargetError(
            f"torch.compile has no backend {shorten(backend, 60)!r}.{suggest(backend, known)} "
            f"Choose from {', '.join(torch.compiler.list_backends())}, or a debugging backend "
            "such as eager or aot_eager; torch.compiler.list_backends(()) lists all."
        )


def _explain(
    target: str,
    axes: Mapping[str, int] | None,
    backend: str | None,
    *,
    num_steps: int,
    has_guards: bool,
) -> _Run:
    with (
        isolated_argv(target),
        show_progress(f"explaining {name_target(target)}", is_shown=is_first()) as report,
    ):
        program = load_program(target)
        with _build(program, axes, report) as (model, batch):
            compiled = _compile(model, backend)
            report("compiling and running a step")
            return _run(program, compiled, batch, num_steps=num_steps, has_guards=has_guards)


@contextmanager
def _build(
    program: Program, axes: Mapping[str, int] | None, report: Report
) -> Iterator[tuple[nn.Module, Any]]:
    torch.manual_seed(0)  # so that two runs on random data give the same
    if axes is not None or is_launched():
        with build_model(program, axes, rank=0, has_data=True, report=report) as built:
            yield built.model, built.make_batch()
        return
    report("building the model")
    with user_code(program, "model()"):
        model = program.model()
    if not isinstance(model, nn.Module):
        raise TargetError(
            f"{program.name}'s model() returned {type(model).__name__}, not a torch.nn.Module. "
            "Return the model itself."
        )
    with user_code(program, "batch()"):
        batch = program.batch(model)
    yield model, batch


def _compile(model: nn.Module, backend: str | None) -> Any:
    """The model as the program compiled it, or else compiled."""
    if any(is_compiled(module) for module in model.modules()):
        return model
    return torch.compile(model, backend=run_as_it_is if backend is None else backend)


def _run(program: Program, model: Any, batch: Any, *, num_steps: int, has_guards: bool) -> _Run:
    failure, error = "", None
    explained = None
    try:
        with (
            quiet_compiler(),
            explaining(guards=has_guards, target=program.name) as explained,
        ):
            for _ in range(num_steps):
                program.step(model, batch)
    except KeyboardInterrupt:
        raise
    except BaseException as raised:  # noqa: BLE001 - a program may raise anything, and sys.exit()
        error = raised
        failure = explain_failure(program, "step()", raised, has_data=True)
    assert explained is not None
    return _Run(explained.recording, failure, error)
