"""Meshes of few ranks an axis, in place of the model's own, small enough to play every rank."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import final

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial

from shardscope._torch.dispatch import without_modes
from shardscope._torch.local_ranks import all_ranks, join_ranks, split_ranks
from shardscope._torch.propagation import Place
from shardscope.shard.pieces import cut_piece
from shardscope.shard.signature import Signature

__all__ = ["SmallMesh", "SmallMeshes", "small_meshes"]

_MAX_RANKS = 16  # that one process plays


@final
class SmallMesh:
    """A mesh, its ranks, and where each of them stands on it."""

    def __init__(self, mesh: DeviceMesh, ranks: torch.Tensor) -> None:
        self.mesh = mesh
        self.ranks = frozenset(ranks.flatten().tolist())
        self.num_ranks = len(self.ranks)
        self._shape = list(ranks.shape)
        self._positions = {rank: (ranks == rank).nonzero()[0].tolist() for rank in self.ranks}

    def cut(self, whole: torch.Tensor, place: Place, rank: int) -> torch.Tensor:
        """A rank's piece of a tensor that lies there so."""
        return cut_piece(whole, place, list(zip(self._positions[rank], self._shape, strict=True)))

    def distribute(self, whole: torch.Tensor, place: Place | None) -> torch.Tensor:
        """The tensor as it lies there: on all ranks at once, each with its own piece."""
        with without_modes():
            pieces = {rank: self.cut(whole, place or (), rank).clone() for rank in self.ranks}
        local = join_ranks(pieces)
        if place is None:
            return local
        return DTensor.from_local(
            local, self.mesh, place, run_check=False, shape=whole.shape, stride=whole.stride()
        )

    def adds_up(self) -> bool:
        """Whether a sum over each axis is one: groups that torch cannot find it leaves out."""
        device = torch.device(self.mesh.device_type)
        with without_modes():
            pieces = {rank: torch.ones(1, device=device) for rank in self.ranks}
        parts = [Partial()] * self.mesh.ndim
        with all_ranks(self.ranks):
            summed = DTensor.from_local(join_ranks(pieces), self.mesh, parts, run_check=False)
            sums = split_ranks(summed.full_tensor())
        with without_modes():
            return all(one.item() == self.num_ranks for one in sums.values())


@final
class SmallMeshes:
    """A small mesh for each shape of mesh that is met, made of ranks of this world."""

    def __init__(self) -> None:
        self._groups: list[dist.ProcessGroup] = []
        self._known: dict[tuple[int, ...], SmallMesh | None] = {}

    def find(self, call: Signature) -> SmallMesh | None:
        """The one to compute `call` on, unless its tensors lie on several or none adds up."""
        meshes = {spec.mesh for _, spec in call.tensors() if spec.mesh is not None}
        return self._make(meshes.pop()) if len(meshes) == 1 else None

    def _make(self, mesh: DeviceMesh) -> SmallMesh | None:
        # Not always two ranks an axis: blocks of this shape must fill the mesh.
        shape = tuple(_smallest_factor(size) for size in mesh.shape)
        if shape not in self._known:
            with without_modes():
                self._known[shape] = self._build(mesh, shape)
        return self._known[shape]

    def _build(self, mesh: DeviceMesh, shape: tuple[int, ...]) -> SmallMesh | None:
        if shape == tuple(mesh.shape):
            small = SmallMesh(mesh, mesh.mesh)
        else:
            size = math.prod(shape)
            # This process's own rank must be among them, or the groups would not be its own, and
            # such blocks must fill the world, or torch would not find the groups of the others.
            start = dist.get_rank() // size * size
            if dist.get_world_size() % size or size > _MAX_RANKS:
                return None
            ranks = torch.arange(start, start + size).reshape(shape)
            small = SmallMesh(DeviceMesh(mesh.device_type, ranks), ranks)
            self._groups += small.mesh.get_all_groups()
        return small if small.adds_up() else None

    def close(self, before: set[str]) -> None:
        """End the groups that were made for the meshes."""
        for group in self._groups:
            if group.group_name not in before:
                dist.destroy_process_group(group)


def _smallest_factor(size: int) -> int:
    return next((one for one in range(2, size) if size % one == 0), size)


@contextmanager
def small_meshes(mesh: DeviceMesh) -> Iterator[SmallMeshes]:
    """Small meshes that are gone when the context ends; `mesh` stays as it is."""
    before = {str(group.group_name) for group in mesh.get_all_groups()}
    meshes = SmallMeshes()
    try:
        yield meshes
    finally:
        meshes.close(before)
