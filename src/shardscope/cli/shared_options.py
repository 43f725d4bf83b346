"""Options that several commands share."""

from __future__ import annotations

from typing import get_args

import click

from shardscope.report.text.summary import View

_MESH = "Axes of the mesh and their sizes, such as dp=8,tp=4; each size is at least 1."

by_option = click.option(
    "--by",
    type=click.Choice(list(get_args(View))),
    default="module",
    show_default=True,
    help="Group collectives by this.",
)
strict_option = click.option(
    "--strict", is_flag=True, help="Exit with 1 also if the recording has gaps."
)
force_option = click.option("--force", is_flag=True, help="Overwrite the output if it exists.")
mesh_option = click.option("--mesh", metavar="AXES", help=_MESH)
small_mesh_option = click.option(
    "--mesh", metavar="AXES", default="tp=2", show_default=True, help=_MESH
)
rank_option = click.option(
    "--rank", type=int, default=0, show_default=True, help="Rank to simulate."
)
data_option = click.option(
    "--data",
    is_flag=True,
    help="Simulate with real tensor data, for programs that read values.",
)
device_option = click.option(
    "--device",
    type=click.Choice(["cuda", "cpu"]),
    show_default="cuda",
    help="Device to simulate; cuda needs no GPU, except with --data.",
)
output_option = click.option(
    "-o",
    "--output",
    metavar="OUT",
    show_default="NAME.shardscope.json.gz",
    help="File for the recording (.json or .json.gz); {rank} in it becomes the rank.",
)
seed_option = click.option(
    "--seed", type=int, default=0, show_default=True, help="Seed for random numbers."
)
no_fold_option = click.option(
    "--no-fold",
    is_flag=True,
    help="Show every module, including repeated layers and those without figures.",
)
batch_axis_option = click.option(
    "--batch-axis",
    "batch_axes",
    metavar="AXIS",
    multiple=True,
    show_default="none: every rank gets the full batch",
    help="Mesh axis over which the batch is sharded; may be repeated.",
)
batch_dim_option = click.option(
    "--batch-dim",
    type=int,
    default=0,
    show_default=True,
    help="Dim of the batch's tensors that is sharded over the batch axes; of a program, the dim of "
    "samples.",
)
