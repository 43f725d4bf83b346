"""Which rank holds which slice of a tensor, for any number of dims and mesh axes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardscope._torch.dispatch import disable_dispatch_modes
from shardscope._torch.mesh import describe_axes, describe_placements
from shardscope._torch.private import explain_moved_names
from shardscope.errors import AuditError
from shardscope.record import Slice, Stretches, TensorLayout, compress_ranks, cut_stretches


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
    """The distinct slices, each with the ranks that hold it."""
    shard_axes = [
        axis for axis, placement in enumerate(placements) if _shard_dim(placement) is not None
    ]
    with disable_dispatch_modes():  # a simulated world's would leave the ranks without values
        ranks = mesh.mesh.movedim(shard_axes, list(range(len(shard_axes))))
        ranks_by_coordinate = ranks.reshape(math.prod(ranks.shape[: len(shard_axes)]), -1).tolist()
    holders: dict[tuple[Stretches, ...], list[int]] = {}
    coordinates = product(*(range(mesh.size(axis)) for axis in shard_axes))
    for coordinate, same_ranks in zip(coordinates, ranks_by_coordinate, strict=True):
        position = dict(zip(shard_axes, coordinate, strict=True))
        stretches = _stretches_at(shape, tuple(mesh.shape), placements, position)
        holders.setdefault(stretches, []).extend(same_ranks)
    return tuple(
        Slice(ranks=compress_ranks(sorted(ranks)), stretches=stretches)
        for stretches, ranks in holders.items()
    )


def _stretches_at(
    shape: tuple[int, ...], mesh: tuple[int, ...], placements: Sequence[Any], at: dict[int, int]
) -> tuple[Stretches, ...]:
    """The index ranges that the ranks at the coordinate `at` hold, by dim.

    Each axis splits the ranges that the axes before it left. FSDP shards after tensor parallelism
    but comes before it in the mesh: the split factor of its placements is the number of parts
    before it shards.
    """
    stretches: list[Stretches] = [((0, size),) for size in shape]
    order = sorted(range(len(mesh)), key=lambda axis: getattr(placements[axis], "split_factor", 1))
    for axis in order:
        dim = _shard_dim(placements[axis])
        if dim is not None:
            stretches[dim] = cut_stretches(stretches[dim], mesh[axis], at[axis])
    return tuple(stretches)


def _shard_dim(placement: Any) -> int | None:
    """The dim that a placement shards, or None."""
    is_sharded = placement.is_shard() or hasattr(placement, "split_factor")
    return int(placement.dim) if is_sharded else None


def shard_sizes(tensor: DTensor, dim: int) -> tuple[int, ...]:
    """The size of each part of a dim, ordered by the coordinates along the axes that shard it.

    Empty parts are included, as 0.
    """
    shape, mesh = tuple(tensor.shape), tuple(tensor.device_mesh.shape)
    shard_axes = [
        a for a, placement in enumerate(tensor.placements) if _shard_dim(placement) == dim
    ]
    sizes = []
    for coordinate in product(*(range(mesh[axis]) for axis in shard_axes)):
        at = dict.fromkeys(range(len(mesh)), 0) | dict(zip(shard_axes, coordinate, strict=True))
        stretches = _stretches_at(shape, mesh, tensor.placements, at)[dim]
        sizes.append(sum(stop - start for start, stop in stretches))
    return tuple(sizes)
