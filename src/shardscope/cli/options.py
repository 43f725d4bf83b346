"""Options that several verbs share."""

from __future__ import annotations

from typing import get_args

import click

from shardscope.report.text import View

__all__ = [
    "by_option",
    "data_option",
    "device_option",
    "force_option",
    "mesh_option",
    "no_fold_option",
    "output_option",
    "rank_option",
    "recording_option",
    "seed_option",
    "strict_option",
]

by_option = click.option(
    "--by",
    type=click.Choice(list(get_args(View))),
    default="module",
    show_default=True,
    help="What to sort collectives by.",
)
strict_option = click.option(
    "--strict", is_flag=True, help="Exit with 1 if the recording has gaps."
)
force_option = click.option("--force", is_flag=True, help="Overwrite OUT.")
mesh_option = click.option("--mesh", metavar="AXES", help="Axes of the mesh, such as dp=8,tp=4.")
rank_option = click.option(
    "--rank", type=int, default=0, show_default=True, help="Rank to simulate."
)
data_option = click.option(
    "--data", is_flag=True, help="Simulate with real tensors (DDP needs them)."
)
device_option = click.option(
    "--device",
    type=click.Choice(["cuda", "cpu"]),
    help="Device to simulate; cuda needs no GPU, except with --data.  [default: cuda]",
)
output_option = click.option(
    "-o",
    "--output",
    metavar="OUT",
    help="File to write (.json, .json.gz); {rank} in it becomes the rank.",
)
recording_option = click.option(
    "-o", "--output", metavar="OUT", help="Recording to write (.json, .json.gz)."
)
seed_option = click.option(
    "--seed", type=int, default=0, show_default=True, help="Of random numbers."
)
no_fold_option = click.option(
    "--no-fold", is_flag=True, help="Show every module, repeated and silent ones too."
)
