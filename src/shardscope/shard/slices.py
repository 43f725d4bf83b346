"""Which rank holds which part of a tensor, for any number of dims and mesh axes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardscope._torch.dispatch import without_modes
from shardscope._torch.meshes import describe_axes, describe_placements
from shardscope._torch.private import explain_moved_names
from shardscope.errors import AuditError
from shardscope.record import Slice, Stretches, TensorLayout, compress_ranks, cut_stretches

__all__ = ["cut_sizes", "visualize_sharding"]


@explain_moved_names
def visualize_sharding(tensor: torch.Tensor, *, name: str = "") -> TensorLayout:
    """List which rank holds which slice of a DTensor; `show` draws it.

    Args:
        tensor: A DTensor.
        name: What drawings call it.

    Examples:
        >>> show(visualize_sharding(model.layers[0].up.weight, name="layers.0.up.weight"))
    """
    if not isinstance(tensor, DTensor):
        raise AuditError(
            f"visualize_sharding() got {type(tensor).__name__}, which has no placements. Give "
            "it a DTensor, such as a parameter of a sharded model."
        )
    mesh, placements = tensor.device_mesh, tensor.placements
    return TensorLayout(
        name=name,
        shape=tuple(tensor.shape),
        axes=describe_axes(mesh),
        placements=describe_placements(placements),
        slices=_find_slices(tuple(tensor.shape), mesh, placements),
    )


def _find_slices(
    shape: tuple[int, ...], mesh: DeviceMesh, placements: Sequence[Any]
) -> tuple[Slice, ...]:
    """Coordinates along axes that shard nothing are not looked at one by one: all hold the same."""
    cutting = [axis for axis, placement in enumerate(placements) if _cut_dim(placement) is not None]
    with without_modes():  # a simulated world's would leave the ranks without values
        ranks = mesh.mesh.movedim(cutting, list(range(len(cutting))))
        alike = ranks.reshape(math.prod(ranks.shape[: len(cutting)]), -1).tolist()
    holders: dict[tuple[Stretches, ...], list[int]] = {}
    coordinates = product(*(range(mesh.size(axis)) for axis in cutting))
    for coordinate, members in zip(coordinates, alike, strict=True):
        position = dict(zip(cutting, coordinate, strict=True))
        stretches = _stretches_at(shape, tuple(mesh.shape), placements, position)
        holders.setdefault(stretches, []).extend(members)
    return tuple(
        Slice(ranks=compress_ranks(sorted(ranks)), stretches=stretches)
        for stretches, ranks in holders.items()
    )


def _stretches_at(
    shape: tuple[int, ...], mesh: tuple[int, ...], placements: Sequence[Any], at: dict[int, int]
) -> tuple[Stretches, ...]:
    """What the ranks at the coordinate `at` hold: each axis cuts what those before it left.

    FSDP comes after tensor parallelism but stands before it in the mesh: its placements say by
    their split factor how many parts there were before they cut.
    """
    held: list[Stretches] = [((0, size),) for size in shape]
    order = sorted(range(len(mesh)), key=lambda axis: getattr(placements[axis], "split_factor", 1))
    for axis in order:
        dim = _cut_dim(placements[axis])
        if dim is not None:
            held[dim] = cut_stretches(held[dim], mesh[axis], at[axis])
    return tuple(held)


def _cut_dim(placement: Any) -> int | None:
    """The dim that a placement cuts, if it does."""
    is_cut = placement.is_shard() or hasattr(placement, "split_factor")
    return int(placement.dim) if is_cut else None


def cut_sizes(tensor: DTensor, dim: int) -> tuple[int, ...]:
    """How much of a dim each part has, in the order of the coordinates along the axes that cut it.

    Parts that a rank has nothing of are there too, as 0.
    """
    shape, mesh = tuple(tensor.shape), tuple(tensor.device_mesh.shape)
    cutting = [a for a, placement in enumerate(tensor.placements) if _cut_dim(placement) == dim]
    sizes = []
    for coordinate in product(*(range(mesh[axis]) for axis in cutting)):
        at = dict.fromkeys(range(len(mesh)), 0) | dict(zip(cutting, coordinate, strict=True))
        stretches = _stretches_at(shape, mesh, tensor.placements, at)[dim]
        sizes.append(sum(stop - start for start, stop in stretches))
    return tuple(sizes)
