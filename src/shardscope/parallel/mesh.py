"""A mesh by its axes, whether a process group stands behind it or not."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import Any, final

import torch
from torch.distributed.device_mesh import DeviceMesh

from shardscope.errors import PlanError
from shardscope.parallel.layouts import Seat
from shardscope.record import Axis

__all__ = ["Mesh", "describe_axes", "read_mesh"]


_MAX_RANKS = 16_384


@final
@dataclass(frozen=True, eq=False)
class Mesh:
    """Axes with their sizes in order, and the ranks that sit on them."""

    axes: Mapping[str, int]
    ranks: torch.Tensor  # of the axes' sizes
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
    def seats(self) -> list[Seat]:
        """One for each rank, in row-major order."""
        return [Seat(self.sizes, at) for at in product(*map(range, self.sizes))]

    def rank_at(self, seat: Seat) -> int:
        """The global rank that sits there."""
        return int(self.ranks[seat.coordinates])

    def seat_of(self, rank: int) -> Seat:
        """Where a global rank sits."""
        if not isinstance(rank, int):
            raise PlanError(f"{rank!r} is not a rank. Give its number.")
        found = (self.ranks == rank).nonzero()
        if not len(found):
            known = ", ".join(str(int(one)) for one in self.ranks.flatten()[:8])
            raise PlanError(
                f"rank {rank} is not part of the mesh {describe_axes(self.axes)} (its ranks are "
                f"{known}{(', …' if self.num_ranks > 8 else '')}). Choose one of those."
            )
        return Seat(self.sizes, tuple(int(one) for one in found[0]))

    def own_rank(self) -> int:
        """This process's rank; the mesh's first where no process group stands behind it."""
        if self.device_mesh is not None:
            return int(self.device_mesh.get_rank())
        return int(self.ranks.flatten()[0])

    def group_ranks(self, axis: int, seat: Seat) -> tuple[int, ...]:
        """The ranks that share all coordinates but the axis's."""
        at: list[Any] = list(seat.coordinates)
        at[axis] = slice(None)
        key = (axis, *at[:axis], *at[axis + 1 :])
        if key not in self._groups:
            self._groups[key] = tuple(self.ranks[tuple(at)].tolist())
        return self._groups[key]

    def group_name(self, axis: int, seat: Seat) -> str:
        """The name of the process group of the axis; made up where this process has none."""
        name, ranks = list(self.axes)[axis], self.group_ranks(axis, seat)
        if ranks in self.group_names:
            return self.group_names[ranks]
        if self.device_mesh is not None and self.rank_at(seat) == self.own_rank():
            return str(self.device_mesh.get_group(axis).group_name)
        return f"{name}:{'-'.join(map(str, ranks))}"


def read_mesh(mesh: Any) -> Mesh:
    """A DeviceMesh, {"dp": 2, "tp": 4}, "dp=2,tp=4", or a number of ranks (the axis "tp")."""
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


def _read_axes(mesh: Any) -> dict[str, int]:
    if isinstance(mesh, int) and not isinstance(mesh, bool):
        mesh = {"tp": mesh}
    given = mesh
    if isinstance(mesh, str):
        parts = [part.partition("=")[::2] for part in mesh.replace(" ", "").split(",")]
        mesh = dict(parts)
        if len(mesh) < len(parts):
            raise _bad_mesh(given)
    if not isinstance(mesh, Mapping) or not mesh:
        raise _bad_mesh(given)
    if any(isinstance(size, (bool, float)) for size in mesh.values()):
        raise _bad_mesh(given)
    try:
        axes = {str(name): int(size) for name, size in mesh.items()}
    except (TypeError, ValueError):
        raise _bad_mesh(given) from None
    if any(size < 1 or not name for name, size in axes.items()):
        raise _bad_mesh(given)
    if math.prod(axes.values()) > _MAX_RANKS:
        raise PlanError(
            f"a mesh of {math.prod(axes.values()):,} ranks is more than the {_MAX_RANKS:,} that "
            "are supported. Use a smaller mesh."
        )
    return axes


def _bad_mesh(mesh: Any) -> PlanError:
    return PlanError(
        f"{mesh!r} is not a mesh. Give a DeviceMesh, or names of axes with their sizes such as "
        '{"dp": 2, "tp": 4} or "dp=2,tp=4".'
    )
