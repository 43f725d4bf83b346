"""`shardscope demo`: one training step of an 8B Llama on 1,024 ranks, simulated here and now."""

from __future__ import annotations

import dataclasses
import logging

import click
import torch
from torch import nn

from shardscope.cli import _llama
from shardscope.cli.console import print_line, print_out, show_progress
from shardscope.cli.mesh import parse_mesh
from shardscope.cli.options import force_option
from shardscope.cli.own_names import check_own_name, save_under_own_name
from shardscope.cli.rehearsal import rehearse
from shardscope.cli.surroundings import name_command
from shardscope.cli.target import Program
from shardscope.comm.review import review
from shardscope.errors import TargetError
from shardscope.record import check_output, save
from shardscope.report.text import render_summary

__all__ = ["command"]


@click.command("demo")
@click.option("--mesh", default="dp=128,tp=8", show_default=True, help="Axes of the mesh.")
@click.option("--rank", type=int, default=0, show_default=True, help="Rank to simulate.")
@click.option("--layers", type=click.IntRange(1), default=32, show_default=True, help="Depth.")
@click.option("-o", "--output", metavar="OUT", help="File to write (.json, .json.gz).")
@force_option
def command(mesh: str, rank: int, layers: int, output: str | None, force: bool) -> None:
    """Simulate a training step of an 8B Llama on 1,024 ranks (FSDP2 + tensor parallel).

    Needs no GPU, no network and no arguments; takes seconds and writes a recording.
    """
    # The gradient norm is reduced over one axis after the other; torch would log advice on that.
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)
    axes = parse_mesh(mesh)
    if output:
        check_output(output, force=force)
    else:
        check_own_name("demo")
    with show_progress("simulating") as report:
        rehearsal = rehearse(_program(layers), axes, rank=rank, is_real=False, report=report)
    if rehearsal.failure is not None:
        raise TargetError(rehearsal.failure) from rehearsal.error
    recording = review(name_command(rehearsal.recording))
    try:
        print_out(render_summary(recording))
    finally:  # what cannot be printed can still be saved, and the other way round
        with show_progress("saving the recording"):
            path = (
                save(recording, output, force=force)
                if output
                else save_under_own_name(recording, "demo")
            )
    print_line()
    print_line(f"recording saved to {path}")
    print_line(f"look at it again with: shardscope show {path} --by cause")


def _program(num_layers: int) -> Program:
    config = dataclasses.replace(_llama.LLAMA_8B, num_layers=num_layers)

    def make_model() -> nn.Module:
        return _llama.Llama(config)

    def make_batch(model: nn.Module) -> torch.Tensor:
        assert isinstance(model, _llama.Llama)
        return _llama.batch(model)

    return Program("demo", make_model, make_batch, _llama.parallelize, _llama.step)  # type: ignore[arg-type]
