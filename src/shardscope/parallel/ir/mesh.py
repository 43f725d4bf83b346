"""A device mesh by the names and sizes of its axes, with or without process groups."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import final

import torch
from torch.distributed.device_mesh import DeviceMesh

from shardscope.errors import PlanError
from shardscope.parallel.ir.shard_spec import MeshCoordinate
from shardscope.record import Axis

_MAX_RANKS = 16_384


@final
@dataclass(frozen=True, eq=False)
class Mesh:
    """Axes with their sizes in order, and the global rank at each mesh coordinate."""

    axes: Mapping[str, int]
    ranks: torch.Tensor  # global ranks, in the shape of the axes' sizes
    device_mesh: DeviceMesh | None = None
    _groups: dict[tuple[int, ...], tuple[int, ...]] = field(
        default_factory=dict, init=False, repr=False
    )
    group_names: Mapping[tuple[int, ...], str] = field(default_factory=dict)  # by ranks, if known

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(self.axes.values())

    @property
    def records(self) -> tuple[Axis, ...]:
        """The axes as records."""
        return tuple(Axis(name=name, size=size) for name, size in self.axes.items())

    @property
    def num_ranks(self) -> int:
        return math.prod(self.sizes)

    @property
    def coordinates(self) -> list[MeshCoordinate]:
        """The mesh coordinate of each rank, in row-major order."""
        return [MeshCoordinate(self.sizes, at) for at in product(*map(range, self.sizes))]

    def rank_at(self, coordinate: MeshCoordinate) -> int:
        """The global rank at a mesh coordinate."""
        return int(self.ranks[coordinate.coordinates])

    def coordinate_of(self, rank: int) -> MeshCoordinate:
        """The mesh coordinate of a global rank."""
        if not isinstance(rank, int):
            raise PlanError(f"{rank!r} is not a rank. Give its number.")
        matches = (self.ranks == rank).nonzero()
        if not len(matches):
            known = ", ".join(str(int(member)) for member in self.ranks.flatten()[:8])
            raise PlanError(
                f"rank {rank} is not part of the mesh {describe_axes(self.axes)} (its ranks are "
                f"{known}{(', …' if self.num_ranks > 8 else '')}). Choose one of those."
            )
        return MeshCoordinate(self.sizes, tuple(int(index) for index in matches[0]))

    def own_rank(self) -> int:
        """This process's rank; the mesh's first rank if the mesh has no process groups."""
        if self.device_mesh is not None:
            return int(self.device_mesh.get_rank())
        return int(self.ranks.flatten()[0])

    def group_ranks(self, axis: int, coordinate: MeshCoordinate) -> tuple[int, ...]:
        """The ranks that differ from `coordinate` along the axis only."""
        before, after = coordinate.coordinates[:axis], coordinate.coordinates[axis + 1 :]
        key = (axis, *before, *after)
        if key not in self._groups:
            index: tuple[int | slice, ...] = (*before, slice(None), *after)
            self._groups[key] = tuple(self.ranks[index].tolist())
        return self._groups[key]

    def group_name(self, axis: int, coordinate: MeshCoordinate) -> str:
        """The name of the axis's process group; a made-up name if this process has none."""
        name, ranks = list(self.axes)[axis], self.group_ranks(axis, coordinate)
        if ranks in self.group_names:
            return self.group_names[ranks]
        if self.device_mesh is not None and self.rank_at(coordinate) == self.own_rank():
            return str(self.device_mesh.get_group(axis).group_name)
        return f"{name}:{'-'.join(map(str, ranks))}"


def read_mesh(mesh: object) -> Mesh:
    """Convert a DeviceMesh, {"dp": 2, "tp": 4}, "dp=2,tp=4", or a number of ranks (axis "tp") to a
    Mesh.
    """
    if isinstance(mesh, Mesh):
        return mesh
    if isinstance(mesh, DeviceMesh):
        names = mesh.mesh_dim_names or tuple(f"axis{i}" for i in range(mesh.ndim))
        if mesh.mesh_dim_names is None and mesh.ndim == 1:
            names = ("tp",)
        return Mesh(dict(zip(names, mesh.mesh.shape, strict=True)), mesh.mesh.cpu(), mesh)
    axes = _read_axes(mesh)
    sizes = tuple(axes.values())
    return Mesh(axes, torch.arange(math.prod(sizes)).reshape(sizes))


def describe_axes(axes: Mapping[str, int]) -> str:
    """`dp=2, tp=4`."""
    return ", ".join(f"{name}={size}" for name, size in axes.items())


def _read_axes(mesh: object) -> dict[str, int]:
    if isinstance(mesh, int) and not isinstance(mesh, bool):
        mesh = {"tp": mesh}
    original = mesh
    if isinstance(mesh, str):
        parts = [part.partition("=")[::2] for part in mesh.replace(" ", "").split(",")]
        mesh = dict(parts)
        if len(mesh) < len(parts):
            raise _bad_mesh(original)
    if not isinstance(mesh, Mapping) or not mesh:
        raise _bad_mesh(original)
    if any(isinstance(size, (bool, float)) for size in mesh.values()):
        raise _bad_mesh(original)
    try:
        axes = {str(name): int(size) for name, size in mesh.items()}
    except (TypeError, ValueError):
        raise _bad_mesh(original) from None
    if any(size < 1 or not name for name, size in axes.items()):
        raise _bad_mesh(original)
    if math.prod(axes.values()) > _MAX_RANKS:
        raise PlanError(
            f"a mesh of {math.prod(axes.values()):,} ranks is more than the {_MAX_RANKS:,} that "
            "are supported. Use a smaller mesh."
        )
    return axes


def _bad_mesh(mesh: object) -> PlanError:
    return PlanError(
        f"{mesh!r} is not a mesh. Give a DeviceMesh, or names of axes with their sizes such as "
        '{"dp": 2, "tp": 4} or "dp=2,tp=4".'
    )
