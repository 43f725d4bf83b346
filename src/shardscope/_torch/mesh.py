"""Device meshes: which process group is which axis, and DTensor placements as short text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardscope._torch.private import find_name, is_missing
from shardscope.record import Axis

_world = find_name(
    "torch.distributed.distributed_c10d._world",
    "distinguish worlds, and groups with the same ranks by creation order",
)


def root_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The mesh that `mesh` was sliced from, or `mesh` itself."""
    return mesh._get_root_mesh()


def axis_names(mesh: DeviceMesh) -> tuple[str, ...]:
    """Names of the axes; `dim_0`, …, as in torch, if the mesh has none."""
    return tuple(mesh.mesh_dim_names or (f"dim_{i}" for i in range(mesh.ndim)))


def describe_axes(mesh: DeviceMesh) -> tuple[Axis, ...]:
    """The axes as records."""
    sizes = zip(axis_names(mesh), mesh.shape, strict=True)
    return tuple(Axis(name=name, size=size) for name, size in sizes)


def choose_mesh(used: Sequence[DeviceMesh], known: Sequence[DeviceMesh]) -> DeviceMesh | None:
    """The mesh whose axes describe a run: the root with the most ranks; None if there is no mesh.

    A program may make a mesh of all ranks with one axis, and divide that axis in several ways. Then
    it is the division with the axes of the most parameters.

    Args:
        used: The mesh of every parameter.
        known: Other meshes of the program.
    """
    meshes = {id(mesh): mesh for mesh in (*known, *used)}.values()
    if not meshes:
        return None
    largest = max(map(root_mesh, meshes), key=lambda root: root.size())
    if largest.ndim > 1:
        return largest
    names = Counter(name for mesh in used for name in axis_names(mesh))
    divisions = [mesh for mesh in meshes if mesh.size() == largest.size() and mesh.ndim > 1]
    return max(divisions, key=lambda mesh: _count_axes(mesh, names), default=largest)


def _count_axes(mesh: DeviceMesh, names: Counter[str]) -> tuple[int, int]:
    """How often the axes of `mesh` with several ranks occur among `names`, and their number."""
    axes = [name for name, size in zip(axis_names(mesh), mesh.shape, strict=True) if size > 1]
    return sum(names[name] for name in axes), len(axes)


def group_axes(mesh: DeviceMesh) -> dict[str, str]:
    """Axis name by process-group name, for the groups of `mesh` and of its flattened parts."""
    axes: dict[str, str] = {}
    root = root_mesh(mesh)
    for candidate in (mesh, root, *getattr(root, "_flatten_mapping", {}).values()):
        axes = {**_axes_of(candidate), **axes}
    return axes


def _axes_of(mesh: DeviceMesh) -> dict[str, str]:
    if mesh.get_coordinate() is None:  # this rank is not in the mesh
        return {}
    return {mesh.get_group(i).group_name: name for i, name in enumerate(axis_names(mesh))}


def group_label(group: dist.ProcessGroup) -> str | None:
    """The axis name in the description of a group that a mesh created, or None."""
    description = group.group_desc
    if description.startswith("mesh_") and description != "mesh_default":
        return description.removeprefix("mesh_")
    return None


_named_world = dist.group if is_missing(_world) else _world
_DEFAULT_GROUP = "WORLD" if is_missing(_world) else "default_pg"


def default_group() -> dist.ProcessGroup | None:
    """The group of all ranks, which identifies a world; None if not initialized."""
    group: dist.ProcessGroup | None = getattr(_named_world, _DEFAULT_GROUP)
    return group


def earlier_twins(group: dist.ProcessGroup) -> Iterator[dist.ProcessGroup]:
    """Groups with the same ranks that were created before `group`."""
    members = {} if is_missing(_world) else _world.pg_group_ranks
    ranks = members.get(group)
    for candidate, candidate_ranks in members.items():
        if candidate is group:
            return
        if (
            ranks is not None
            and len(candidate_ranks) == len(ranks)
            and list(candidate_ranks) == list(ranks)
        ):
            yield candidate


def group_backend(group: dist.ProcessGroup | None = None) -> str:
    """The backend's name, as torch prints it; "fake" if the group is simulated."""
    return str(dist.distributed_c10d.get_backend(group))


def describe_placements(placements: Iterable[Any]) -> tuple[str, ...]:
    """`Shard(0)`, `Replicate`, `Partial(sum)`: one per mesh axis."""
    return tuple(_describe(placement) for placement in placements)


def _describe(placement: Any) -> str:
    if placement.is_replicate():
        return "Replicate"
    name = type(placement).__name__.lstrip("_")
    if placement.is_partial():
        return f"{name}({getattr(placement, 'norm_type', placement.reduce_op)})"
    dim = getattr(placement, "dim", None)
    return name if dim is None else f"{name}({dim})"


def local_shape(tensor: torch.Tensor) -> tuple[int, ...]:
    """The shape of this rank's shard of a DTensor, or of a plain tensor."""
    return tuple(tensor._local_tensor.shape if isinstance(tensor, DTensor) else tensor.shape)
