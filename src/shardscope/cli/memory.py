"""`shardscope memory`: whether a step of the user's program fits into a GPU's memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import click
import torch
from torch import nn
from torch.optim import Optimizer

from shardscope.cli.build_model import BuiltModel, build_model, user_code
from shardscope.cli.console import exit_code, show_progress
from shardscope.cli.destination import Destination
from shardscope.cli.mesh_option import parse_mesh
from shardscope.cli.program import LaunchedProgram, program_options
from shardscope.cli.shared_options import (
    data_option,
    force_option,
    mesh_option,
    no_fold_option,
    output_option,
    rank_option,
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
from shardscope.record import Recording
from shardscope.record.units import parse_size
from shardscope.report.text.style import shorten
from shardscope.report.text.summary import render_summary
from shardscope.shard.memory.memory import memory

__frames__ = "outermost"  # our callers are not the user's program

_ALONE = {"dp": 1}
_MIN_GPU_BYTES = 16 << 20


@click.command(
    "memory",
    cls=Verb,
    examples=[
        "shardscope memory train.py",
        "shardscope memory train.py --mesh dp=8,tp=4 --gpu-memory 80GiB",
        "shardscope memory --nnodes 16 --gpu h100 -- pretrain.py",
    ],
    fails_if="The step does not fit into --gpu-memory or --gpu, or, with --strict, there is a gap.",
    takes_program=True,
)
@click.argument("target", metavar="TARGET", required=False)
@program_options(
    "num_nodes",
    "num_per_node",
    "ranks",
    "steps",
    "gpu",
    target_only=("mesh", "rank", "gpu_memory", "data"),
)
@mesh_option
@rank_option
@click.option(
    "--gpu-memory",
    metavar="SIZE",
    help="Memory of one GPU, such as 80GiB; says whether the step fits.",
)
@data_option
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
    gpu_memory: str | None,
    data: bool,
    no_fold: bool,
    output: str | None,
    force: bool,
    strict: bool,
) -> None:
    """Estimate the peak GPU memory of a training step of TARGET, by kind and by module.

    TARGET is as for trace; it may also define optimizer(model), which is stepped after each step.
    If it defines neither that nor step(), AdamW is used. Needs no GPU. Without --mesh the model is
    not sharded. With --gpu-memory the output says whether the step fits, and if not, what to
    change.

    Instead of TARGET, an unmodified training program may follow --: see shardscope run. The
    output says whether its step fits into the memory of --gpu.
    """
    if program is not None:
        ctx.exit(
            program.observe(
                "memory",
                lambda recording: [render_summary(recording, is_folded=not no_fold)],
                output=output,
                force=force,
                strict=strict,
            )
        )
    axes = None if mesh is None else parse_mesh(mesh)
    device_bytes = None if gpu_memory is None else parse_gpu_memory(gpu_memory)
    destination = Destination(name_target(target), output, rank=rank, force=force)
    profile = _profile(target, axes, rank=rank, has_data=data, device_bytes=device_bytes)
    recording = name_command(profile)
    destination.finish(recording, render_summary(recording, is_folded=not no_fold))
    ctx.exit(exit_code(recording, is_strict=strict))


def parse_gpu_memory(text: str) -> int:
    """The bytes of `80GiB`, `80 GB` or `80g` (binary)."""
    num_bytes = parse_size(text)
    if not num_bytes:
        raise TargetError(f"--gpu-memory must be a size, such as 80GiB; got {shorten(text, 60)!r}.")
    if num_bytes < _MIN_GPU_BYTES:
        number = shorten(text.strip(), 60)
        meant = f"{number}GiB" if number.isdecimal() else "80GiB"
        raise TargetError(
            f"--gpu-memory {number!r} is only {num_bytes:,} bytes. "
            f"Did you mean --gpu-memory {meant}?"
        )
    return num_bytes


def _profile(
    target: str,
    axes: Mapping[str, int] | None,
    *,
    rank: int,
    has_data: bool,
    device_bytes: int | None,
) -> Recording:
    with isolated_argv(target), show_progress(f"running {name_target(target)}") as report:
        program = load_program(target)
        if axes is None:
            program = replace(program, parallelize=None)
        with build_model(
            program,
            axes or _ALONE,
            rank=rank,
            is_real=False,
            has_data=has_data,
            device="cpu" if has_data else "cuda",
            report=report,
        ) as built:
            batch = built.make_batch()
            report("running two steps")
            with user_code(program, "step()", has_data=has_data):
                return memory(
                    built.model,
                    lambda: program.step(built.model, batch),
                    _make_optimizer(built),
                    device_bytes=device_bytes,
                ).recording


def _make_optimizer(built: BuiltModel) -> Optimizer | None:
    program, model = built.program, built.model
    if program.optimizer is None:
        is_default = program.step is run_default_step
        return _default_optimizer(model) if is_default else None
    with user_code(program, "optimizer()", has_data=built.has_data):
        optimizer = program.optimizer(model)
    if not isinstance(optimizer, Optimizer):
        raise TargetError(
            f"{program.name}'s optimizer() returned {type(optimizer).__name__}, not a "
            "torch.optim.Optimizer. Return the optimizer itself."
        )
    return optimizer


def _default_optimizer(model: nn.Module) -> Optimizer | None:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(trained) if trained else None
