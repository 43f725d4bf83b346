"""`shardscope demo`: one training step of an 8B Llama on 1,024 ranks, simulated here and now."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path

import click
import torch
from torch import nn

from shardscope.cli import _llama
from shardscope.cli.console import open_console, show_progress
from shardscope.cli.rehearsal import parse_mesh, rehearse_simulated
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
@click.option("--force", is_flag=True, help="Overwrite OUT.")
def command(mesh: str, rank: int, layers: int, output: str | None, force: bool) -> None:
    """Simulate a training step of an 8B Llama on 1,024 ranks (FSDP2 + tensor parallel).

    Needs no GPU, no network and no arguments; takes seconds and writes a recording.
    """
    # The gradient norm is reduced over one axis after the other; torch would log advice on that.
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)
    axes = parse_mesh(mesh)
    path = output or _unused_path()
    check_output(path, force=force)
    with show_progress("simulating") as report:
        rehearsal = rehearse_simulated(_program(layers), axes, rank=rank, report=report)
    if rehearsal.failure is not None:
        raise TargetError(f"The demo's step failed: {rehearsal.failure}") from rehearsal.error
    recording = review(rehearsal.recording)
    save(recording, path, force=force)
    console = open_console()
    console.print(render_summary(recording))
    console.print(f"\nrecording saved to {path}", soft_wrap=True)
    console.print(f"look at it again with: shardscope show {path} --by cause", soft_wrap=True)


def _program(num_layers: int) -> Program:
    config = dataclasses.replace(_llama.LLAMA_8B, num_layers=num_layers)

    def make_model() -> nn.Module:
        return _llama.Llama(config)

    def make_batch(model: nn.Module) -> torch.Tensor:
        assert isinstance(model, _llama.Llama)
        return _llama.batch(model)

    return Program("demo", make_model, make_batch, _llama.parallelize, _llama.step)  # type: ignore[arg-type]


def _unused_path() -> str:
    """A name of its own for each demo, so that none overwrites another."""
    count, path = 1, Path("demo.shardscope.json.gz")
    while path.exists():
        count += 1
        path = Path(f"demo-{count}.shardscope.json.gz")
    return str(path)
