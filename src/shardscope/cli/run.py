"""`shardscope run`: an unmodified training program as any rank of a simulated cluster."""

from __future__ import annotations

import sys
from typing import Any

import click

from shardscope.cli.console import exit_code, print_next
from shardscope.cli.destination import Destination
from shardscope.cli.program import (
    LaunchedProgram,
    cluster_options,
    print_failures,
    read_program,
)
from shardscope.cli.shared_options import by_option, force_option, output_option, strict_option
from shardscope.cli.verb import FINDINGS_FAIL, Verb
from shardscope.comm.findings import review
from shardscope.report.text.summary import View, render_summary


@click.command(
    "run",
    cls=Verb,
    context_settings={"allow_interspersed_args": False, "ignore_unknown_options": False},
    examples=[
        "shardscope run -- train.py --lr 3e-4",
        "shardscope run --nnodes 128 --ranks 0,1023 -- train.py",
        "shardscope run --nproc-per-node 4 -m package.train --config small",
        "shardscope run --nproc-per-node 4 --data -- train.py",
    ],
    fails_if=FINDINGS_FAIL,
)
@click.argument("program", nargs=-1, required=True, type=click.UNPROCESSED)
@click.option("-m", "is_module", is_flag=True, help="PROGRAM is a module, as for python -m.")
@cluster_options("num_nodes", "num_per_node", "ranks", "steps", "gpu", "checkpoints")
@click.option(
    "--data",
    is_flag=True,
    help="Compute with real numbers: all ranks as processes of this machine, without GPUs.",
)
@click.option(
    "--real", is_flag=True, help="Start real ranks with torchrun on this machine, and trace them."
)
@output_option
@force_option
@by_option
@strict_option
@click.pass_context
def command(
    ctx: click.Context,
    /,
    program: tuple[str, ...],
    is_module: bool,
    data: bool,
    real: bool,
    output: str | None,
    force: bool,
    by: View,
    strict: bool,
    **cluster: Any,
) -> None:
    """Run PROGRAM, an unmodified training script, as ranks of a simulated cluster.

    Use it in place of torchrun: the program sees the environment, process groups and GPUs of its
    rank. Nothing is sent, tensors on the GPU have no data, and the program is ended after a few
    training steps. Prints and saves what it communicated and how much memory it needs. With --data,
    all ranks compute real numbers, with gloo and on the CPU.
    """
    launched = LaunchedProgram(read_program(program, is_module=is_module), **cluster)
    destination = Destination(launched.name, output, force=force)
    result = launched.run(data=data, real=real)
    code = 0
    if result.has_recording:
        recording = review(result.recording)
        destination.finish(recording, render_summary(recording, by=by))
        print_next(launched.suggest_next(recording, str(destination.path)))
        code = exit_code(recording, is_strict=strict)
    code = print_failures(result) or code
    sys.stderr.flush()
    ctx.exit(code)
