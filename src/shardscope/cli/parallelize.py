"""`shardscope parallelize`: partitions the user's model into a program per rank and verifies it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor, nn

from shardscope.cli.build_model import user_code
from shardscope.cli.console import exit_code, print_error, show_progress
from shardscope.cli.destination import Destination, print_saved
from shardscope.cli.mesh_option import parse_mesh
from shardscope.cli.shared_options import (
    force_option,
    no_fold_option,
    output_option,
    seed_option,
    small_mesh_option,
)
from shardscope.cli.target import (
    Program,
    add_outputs,
    isolated_argv,
    load_program,
    name_command,
    name_target,
    split_batch,
)
from shardscope.cli.verb import Verb
from shardscope.errors import OutputError, ParallelError, TargetError
from shardscope.parallel import Shard
from shardscope.parallel.api import parallelize
from shardscope.parallel.program import ParallelProgram
from shardscope.record import check_output
from shardscope.record.units import plural
from shardscope.report.text.summary import render_summary

__frames__ = "outermost"  # our callers are not the user's program

Report = Callable[[str], None]


@click.command(
    "parallelize",
    cls=Verb,
    examples=[
        "shardscope parallelize train.py --mesh tp=4 --training",
        "shardscope parallelize train.py --mesh dp=2,tp=2 --batch-axis dp --plan plan.toml",
        "shardscope parallelize train.py --mesh tp=2 --save-dir programs",
    ],
    fails_if="The ranks compute something else, or, with --strict, an op falls back to gathered "
    "tensors.",
)
@click.argument("target", metavar="TARGET")
@small_mesh_option
@click.option(
    "--plan",
    "plan_file",
    metavar="PLAN",
    help="File with the plan (.toml); TARGET needs none then.",
)
@click.option(
    "--batch-axis",
    "batch_axes",
    metavar="AXIS",
    multiple=True,
    help="Mesh axis over which the batch is sharded; may be repeated.",
)
@click.option("--training", is_flag=True, help="Partition the backward pass too.")
@click.option(
    "--no-verify",
    is_flag=True,
    help="Do not run and compare the ranks; the model needs no data then.",
)
@click.option(
    "--strict", is_flag=True, help="Exit with 1 also if an op cannot run on sharded tensors."
)
@seed_option
@no_fold_option
@output_option
@click.option(
    "--save-dir", metavar="DIR", help="Also save each rank's forward program in this folder (.pt2)."
)
@force_option
@click.pass_context
def command(
    ctx: click.Context,
    target: str,
    mesh: str,
    plan_file: str | None,
    batch_axes: tuple[str, ...],
    training: bool,
    no_verify: bool,
    strict: bool,
    seed: int,
    no_fold: bool,
    output: str | None,
    save_dir: str | None,
    force: bool,
) -> None:
    """Partition TARGET's model for a mesh according to a plan, and verify the result.

    TARGET is a file (train.py) or a module (package.train) that defines model(), batch(model)
    and, without --plan, a plan: module names with their parallel styles. With --training it may
    define loss(output); by default the loss is the sum of the outputs. All ranks run in this
    process and are compared with the original model; if they differ, no programs are saved.
    """
    axes = parse_mesh(mesh)
    destination = Destination(name_target(target), output, force=force)
    files = {} if save_dir is None else _plan_files(Path(save_dir), axes, force=force)
    with isolated_argv(target), show_progress(f"parallelizing {name_target(target)}") as report:
        loaded = load_program(target)
        torch.manual_seed(seed)
        parallel_program = _make(
            loaded,
            axes,
            plan_file or loaded.plan,
            batch_axes=batch_axes,
            is_training=training,
            has_data=not no_verify or bool(files),
            report=report,
        )
        failure = None if no_verify else _verify(parallel_program, report)
        report("measuring")
        unnamed = parallel_program.recording()
    recording = name_command(unnamed)
    destination.finish(recording, render_summary(recording, is_folded=not no_fold))
    code = exit_code(recording)
    if strict and parallel_program.fallbacks:
        failure = f"--strict: {plural(len(parallel_program.fallbacks), 'fallback')}, listed above."
        code = 1
    if failure is not None:
        print_error(failure)
    else:
        _save_programs(parallel_program, files, target)
    ctx.exit(code)


def _make(
    loaded: Program,
    axes: Mapping[str, int],
    plan: Any,
    *,
    batch_axes: tuple[str, ...],
    is_training: bool,
    has_data: bool,
    report: Report,
) -> ParallelProgram:
    if plan is None:
        raise TargetError(
            f"{loaded.name} defines no plan, so it is unknown what to shard. Use --plan plan.toml, "
            'or define one, such as plan = {"layers.*.up": "colwise", "layers.*.down": "rowwise"}.'
        )
    model, args, kwargs = _build(loaded, report, has_data=has_data)
    report("partitioning it")
    inputs = {index: dict.fromkeys(batch_axes, Shard(0)) for index in _batched(args, kwargs)}
    return parallelize(
        model,
        dict(axes),
        plan,
        args=args,
        kwargs=kwargs,
        loss=_loss(loaded) if is_training else None,
        inputs=inputs if batch_axes else None,
        verify=False,
    )


def _build(
    loaded: Program, report: Report, *, has_data: bool
) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    report("building the model")
    device = "cpu" if has_data else "meta"
    with user_code(loaded, "model()", has_data=has_data), torch.device(device):
        model = loaded.model()
    if not isinstance(model, nn.Module):
        raise TargetError(
            f"{loaded.name}'s model() returned {type(model).__name__}, not a torch.nn.Module. "
            "Return the model itself."
        )
    with user_code(loaded, "batch()", has_data=has_data), torch.device(device):
        batch = loaded.batch(model)
    return model, *split_batch(batch)


def _batched(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[int | str]:
    """The positions and names of inputs that have a batch dim."""
    items: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
    return [key for key, value in items if isinstance(value, Tensor) and value.dim() > 0]


def _loss(loaded: Program) -> Callable[[Any], Tensor]:
    loss = loaded.loss or add_outputs

    def call(output: Any) -> Tensor:
        with user_code(loaded, "loss()"):
            return loss(output)

    return call


def _verify(parallel_program: ParallelProgram, report: Report) -> str | None:
    """How the ranks differ, in a sentence, or None."""
    report("running all ranks")
    try:
        parallel_program.verify()
    except ParallelError as error:
        if parallel_program.verdicts is None:
            raise
        return str(error)
    return None


def _plan_files(folder: Path, axes: Mapping[str, int], *, force: bool) -> dict[int, Path]:
    """The file of each rank's program, checked to be writable before any work is done."""
    num_ranks = torch.Size(axes.values()).numel()
    width = len(str(num_ranks - 1))
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(
            f"the folder '{folder}' cannot be created: {error.strerror}. Choose another."
        ) from error
    files = {rank: folder / f"rank-{rank:0{width}}.pt2" for rank in range(num_ranks)}
    for path in files.values():
        check_output(path, force=force)
    return files


def _save_programs(
    parallel_program: ParallelProgram, files: Mapping[int, Path], target: str
) -> None:
    if not files:
        return
    with show_progress(f"parallelizing {name_target(target)}") as report:
        for rank, path in files.items():
            report(f"writing {path.name}")
            torch.export.save(parallel_program.exported(rank), path)
    for path in files.values():
        print_saved(path)
