"""`shardscope diagnose`: compares the compiled model with eager, and locates a difference."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import click
import torch
from torch import nn

from shardscope.cli.build_model import Report, build_alone, build_model
from shardscope.cli.console import exit_code, show_progress
from shardscope.cli.destination import Destination
from shardscope.cli.json_result import current_json
from shardscope.cli.mesh_option import parse_mesh
from shardscope.cli.shared_options import (
    force_option,
    mesh_option,
    output_option,
    rank_option,
    seed_option,
    strict_option,
)
from shardscope.cli.target import (
    Program,
    isolated_argv,
    load_program,
    name_command,
    name_target,
    split_batch,
)
from shardscope.cli.verb import Verb
from shardscope.compile.diagnose.diagnose import diagnose
from shardscope.errors import TargetError
from shardscope.record import Recording
from shardscope.report.text.summary import render_summary

__frames__ = "outermost"  # our callers are not the user's program


@click.command(
    "diagnose",
    cls=Verb,
    examples=[
        "shardscope diagnose train.py",
        "shardscope diagnose train.py --backend aot_eager --dynamic --folder repro",
    ],
    fails_if="The compiled model fails or computes something else, or, with --strict, there is "
    "a gap.",
)
@click.argument("target", metavar="TARGET")
@mesh_option
@rank_option
@click.option(
    "--backend",
    metavar="NAME",
    default="inductor",
    show_default=True,
    help="Backend of torch.compile to diagnose.",
)
@click.option("--mode", metavar="MODE", help="Mode of torch.compile, such as max-autotune.")
@click.option(
    "--option",
    "options",
    metavar="NAME=VALUE",
    multiple=True,
    help="Option for the backend, such as op=relu; may be repeated.",
)
@click.option("--dynamic/--static", default=None, help="Compile with symbolic or with fixed sizes.")
@click.option(
    "--folder",
    metavar="DIR",
    show_default="a new folder",
    help="Folder for repro.py, which reproduces the failure.",
)
@click.option(
    "--max-queries",
    type=click.IntRange(1),
    default=200,
    show_default=True,
    help="Maximum number of compilations.",
)
@click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(min=0, min_open=True),
    default=300.0,
    show_default=True,
    help="Limit in seconds for one compilation.",
)
@seed_option
@output_option
@force_option
@strict_option
@click.pass_context
def command(
    ctx: click.Context,
    target: str,
    mesh: str | None,
    rank: int,
    backend: str,
    mode: str | None,
    options: tuple[str, ...],
    dynamic: bool | None,
    folder: str | None,
    max_queries: int,
    timeout_s: float,
    seed: int,
    output: str | None,
    force: bool,
    strict: bool,
) -> None:
    """Compile TARGET's model, compare it with eager, and locate the op that makes them differ.

    TARGET is a file (train.py) or a module (package.train) that defines model() and batch(model),
    and optionally loss(output). Gradients are compared too. With --mesh, parallelize(model, mesh)
    shards the model first, as one rank of a simulated world. If the compiled model fails or
    computes something else, the smallest program that shows it is saved as DIR/repro.py.
    """
    axes = None if mesh is None else parse_mesh(mesh)
    destination = Destination(name_target(target), output, rank=rank, force=force)
    recording = _diagnose(
        target,
        axes,
        rank=rank,
        backend=backend,
        mode=mode,
        options=_parse_options(options),
        dynamic=dynamic,
        folder=folder,
        max_queries=max_queries,
        timeout_s=timeout_s,
        seed=seed,
    )
    destination.finish(recording, render_summary(recording))
    if result := current_json():
        for repro in filter(None, (diagnosis.repro for diagnosis in recording.diagnoses)):
            result.add_file(repro, "reproduces the failure with torch alone")
    ctx.exit(exit_code(recording, is_strict=strict))


def _diagnose(
    target: str, axes: Mapping[str, int] | None, *, rank: int, seed: int, **settings: Any
) -> Recording:
    with isolated_argv(target), ExitStack() as stack:
        # The search has a bar of its own.
        with show_progress(f"diagnosing {name_target(target)}") as report:
            program = load_program(target)
            built = _build(program, axes, report, rank=rank, seed=seed)
            model, batch = stack.enter_context(built)
        args, kwargs = split_batch(batch)
        diagnosis = diagnose(
            _with_loss(program, model),
            *args,
            kwargs=kwargs,
            name=program.name,
            seed=seed,
            **settings,
        )
    return name_command(diagnosis.recording)


@contextmanager
def _build(
    program: Program, axes: Mapping[str, int] | None, report: Report, *, rank: int, seed: int
) -> Iterator[tuple[nn.Module, Any]]:
    """The model and its input, for a single device or as a rank of a simulated world."""
    if axes is None:
        yield build_alone(program, report, seed=seed)
        return
    torch.manual_seed(seed)
    with build_model(
        program, axes, rank=rank, is_real=False, has_data=True, report=report
    ) as built:
        yield built.model, built.make_batch()


def _with_loss(program: Program, model: Any) -> Any:
    loss = program.loss
    if loss is None:
        return model

    def model_with_loss(*args: Any, **kwargs: Any) -> Any:
        return loss(model(*args, **kwargs))

    return model_with_loss


def _parse_options(texts: Sequence[str]) -> dict[str, Any] | None:
    options = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise TargetError(
                f"--option {text!r:.80} is not of the form NAME=VALUE. Write, for example, "
                "--option op=relu."
            )
        options[name] = _parse_value(value)
    return options or None


def _parse_value(text: str) -> Any:
    """A Python literal such as a number, bool or list, or else the text itself."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
