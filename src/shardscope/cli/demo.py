"""`shardscope demo`: simulates a training step of an 8B Llama on 1,024 ranks."""

from __future__ import annotations

import dataclasses
import logging
import os
import sys
from pathlib import Path
from shutil import which

import click
import torch
from torch import nn

from shardscope.cli import _llama
from shardscope.cli.console import print_next, show_progress
from shardscope.cli.destination import Destination
from shardscope.cli.mesh_option import parse_mesh
from shardscope.cli.shared_options import force_option, output_option, rank_option
from shardscope.cli.target import Program, name_command
from shardscope.cli.trace import trace_step
from shardscope.cli.verb import Verb
from shardscope.comm.findings import review
from shardscope.errors import TargetError
from shardscope.report.text.style import shorten
from shardscope.report.text.summary import render_summary


@click.command(
    "demo",
    cls=Verb,
    examples=["shardscope demo", "shardscope demo --mesh dp=16,tp=4 --layers 8"],
)
@click.option(
    "--mesh",
    metavar="AXES",
    default="dp=128,tp=8",
    show_default=True,
    help="Sizes of the mesh axes dp (FSDP) and tp (tensor parallel); each is at least 1.",
)
@rank_option
@click.option(
    "--layers",
    type=click.IntRange(1),
    default=32,
    show_default=True,
    help="Number of decoder layers.",
)
@output_option
@force_option
def command(mesh: str, rank: int, layers: int, output: str | None, force: bool) -> None:
    """Simulate a training step of an 8B Llama on 1,024 ranks (FSDP2 + tensor parallel).

    Needs no GPU, no network and no arguments, and takes seconds.
    """
    # The gradient norm is reduced over one axis at a time; torch would log advice on that.
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)
    axes = parse_mesh(mesh)
    if unknown := [name for name in axes if name not in ("dp", "tp")]:
        raise TargetError(
            f"--mesh has the axis {shorten(unknown[0], 60)!r}, and the demo is sharded over dp and "
            "tp only. Leave the axis out, or trace your own program: shardscope trace --help."
        )
    destination = Destination("demo", output, rank=rank, force=force)
    with show_progress("simulating") as report:
        traced_step = trace_step(_program(layers), axes, rank=rank, is_real=False, report=report)
    if traced_step.failure is not None:
        raise TargetError(traced_step.failure) from traced_step.error
    recording = review(name_command(traced_step.recording))
    destination.finish(recording, render_summary(recording))
    print_next(f"{_name_program()} show {destination.path} --by cause", "look at it again with")


def _name_program() -> str:
    """`shardscope`, or its path if it is not on the search path, as in a new .venv."""
    path = Path(sys.argv[0])
    if path.name != "shardscope" or which("shardscope") is not None:
        return "shardscope"
    return os.path.relpath(path)


def _program(num_layers: int) -> Program:
    config = dataclasses.replace(_llama.LLAMA_8B, num_layers=num_layers)

    def make_model() -> nn.Module:
        return _llama.Llama(config)

    def make_batch(model: nn.Module) -> torch.Tensor:
        assert isinstance(model, _llama.Llama)
        return _llama.batch(model)

    return Program("demo", make_model, make_batch, _llama.parallelize, _llama.step)  # type: ignore[arg-type]
