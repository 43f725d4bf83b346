"""`shardscope visualize`: which rank holds which slice of a parameter."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import click
from msgspec.structs import replace
from torch import nn
from torch.distributed.tensor import DTensor

from shardscope.cli.build_model import build_model, choose_device
from shardscope.cli.console import is_first, show_progress
from shardscope.cli.destination import Destination
from shardscope.cli.mesh_option import choose_axes
from shardscope.cli.shared_options import (
    data_option,
    device_option,
    force_option,
    mesh_option,
    no_fold_option,
    output_option,
    rank_option,
)
from shardscope.cli.target import isolated_argv, load_program, name_command, name_target
from shardscope.cli.verb import Verb, suggest
from shardscope.errors import TargetError
from shardscope.record import Recording, TensorLayout
from shardscope.record.patterns import matches_inside
from shardscope.report.model.traffic_totals import fold_ranks
from shardscope.report.text.heading import render_heading
from shardscope.report.text.shard_drawings import render_layout
from shardscope.shard.audit.audit import audit
from shardscope.shard.audit.sharded_tensors import ModelInventory
from shardscope.shard.audit.slices import visualize_sharding

__frames__ = "outermost"  # our callers are not the user's program

_MAX_NAMED = 5


@click.command(
    "visualize",
    cls=Verb,
    examples=[
        "shardscope visualize train.py layers.0.attention.wq.weight --mesh tp=4",
        "shardscope visualize train.py 'layers.0.*' --mesh dp=2,tp=4",
    ],
)
@click.argument("target", metavar="TARGET")
@click.argument("names", nargs=-1, required=True, metavar="NAME...")
@mesh_option
@rank_option
@data_option
@device_option
@no_fold_option
@output_option
@force_option
@click.pass_context
def command(
    ctx: click.Context,
    target: str,
    names: tuple[str, ...],
    mesh: str | None,
    rank: int,
    data: bool,
    device: str | None,
    no_fold: bool,
    output: str | None,
    force: bool,
) -> None:
    """Show which rank holds which slice of the parameters called NAME.

    NAME may be a module, for all its parameters, or a pattern, such as 'layers.*.attention' or
    '**.wq'. TARGET is as for trace.
    """
    axes = choose_axes(target, mesh, verb="visualize")
    destination = Destination(name_target(target), output, rank=rank, force=force)
    recording = name_command(
        _visualize(target, names, axes, rank=rank, has_data=data, device=device)
    )
    # Not the full summary: the tables of the audit are for `shardscope audit`.
    destination.finish(
        recording,
        render_heading(recording, fold_ranks(recording)),
        *(
            part
            for layout in recording.layouts
            for part in render_layout(layout, is_complete=no_fold)
        ),
    )


def _visualize(
    target: str,
    names: tuple[str, ...],
    axes: Mapping[str, int] | None,
    *,
    rank: int,
    has_data: bool,
    device: str | None,
) -> Recording:
    with (
        isolated_argv(target),
        show_progress(f"visualizing {name_target(target)}", is_shown=is_first()) as report,
    ):
        program = load_program(target)
        with build_model(
            program,
            axes,
            rank=rank,
            has_data=has_data,
            device=choose_device(device, has_data=has_data),
            report=report,
        ) as built:
            layouts = tuple(find_layouts(built.model, names))
            return replace(audit(built.model), layouts=layouts)


def find_layouts(model: nn.Module, patterns: tuple[str, ...]) -> Iterator[TensorLayout]:
    """The layouts of the tensors that a pattern matches, or that are inside a matching module."""
    tensors = {entry.name: entry.tensor for entry in ModelInventory(model, rank=0).tensors}
    for pattern in dict.fromkeys(patterns):
        matches = [name for name in tensors if matches_inside(pattern, name)]
        if not matches:
            examples = ", ".join(list(tensors)[:_MAX_NAMED])
            advice = f" It has {examples}, …" if examples else " It has no parameters at all."
            hint = suggest(pattern, list(tensors)) or advice
            raise TargetError(f"The model has no parameter {pattern!r}.{hint}")
        matched = {name: tensors[name] for name in matches}
        layouts = [
            visualize_sharding(tensor, name=name)
            for name, tensor in matched.items()
            if isinstance(tensor, DTensor)
        ]
        if not layouts:
            raise TargetError(
                f"{matches[0]} is not a DTensor: every rank holds all of it. Name a parameter that "
                "parallelize() shards, or list all parameters with shardscope audit."
            )
        yield from layouts
