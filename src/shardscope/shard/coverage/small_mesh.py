"""Meshes with few ranks per axis in place of the model's, and the shard of each rank."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import final

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from shardscope._torch.dispatch import disable_dispatch_modes
from shardscope._torch.dtensor import MeshPlacements, all_ranks, join_ranks, split_ranks
from shardscope.shard.coverage.op_calls import Signature

_REDUCTIONS = ("sum", "avg", "max", "min", "product")


def can_be_sharded(placement: Placement) -> bool:
    """Whether shards of a tensor can be made: not of subclasses, which may have hidden state."""
    if type(placement) is Partial:
        return placement.reduce_op in _REDUCTIONS
    return is_replicate_or_shard(placement)


def is_replicate_or_shard(placement: Placement) -> bool:
    """Whether a placement is Replicate or Shard, so that local tensors need no reduction."""
    return type(placement) in (Replicate, Shard)


def local_shard(
    full: torch.Tensor, placements: Sequence[Placement], position: Sequence[tuple[int, int]]
) -> torch.Tensor:
    """The shard of a rank whose position is the `n`-th of `m` on each axis."""
    shard = full
    for placement, (number, num_ranks) in zip(placements, position, strict=False):
        if isinstance(placement, Shard):
            chunks = shard.chunk(num_ranks, placement.dim)
            missing = shard.narrow(placement.dim, 0, 0)
            shard = chunks[number] if number < len(chunks) else missing
        elif isinstance(placement, Partial):
            shard = _partial_term(shard, placement.reduce_op, number, num_ranks)
    return shard


def _partial_term(full: torch.Tensor, reduce_op: str, number: int, num_ranks: int) -> torch.Tensor:
    """A rank's term of a partial tensor; no term equals the full tensor, and some are negated."""
    if reduce_op in ("max", "min"):
        step = number if reduce_op == "min" else -number
        return full + step if full.dtype is not torch.bool else full
    if reduce_op == "product":
        return full if number == 0 else torch.ones_like(full)
    shift = -(num_ranks - 1) if number == 0 else 1
    factor = num_ranks if reduce_op == "avg" else 1
    term = full * factor if number == 0 else torch.zeros_like(full)
    return term - shift * factor


_MAX_RANKS = 16  # that one process simulates


@final
class SmallMesh:
    """A mesh with the coordinates of its ranks."""

    def __init__(self, mesh: DeviceMesh, ranks: torch.Tensor) -> None:
        self.mesh = mesh
        self.ranks = frozenset(ranks.flatten().tolist())
        self.num_ranks = len(self.ranks)
        self._shape = list(ranks.shape)
        self._positions = {rank: (ranks == rank).nonzero()[0].tolist() for rank in self.ranks}

    def shard(self, full: torch.Tensor, placements: MeshPlacements, rank: int) -> torch.Tensor:
        """A rank's shard of a full tensor with these placements."""
        return local_shard(
            full, placements, list(zip(self._positions[rank], self._shape, strict=True))
        )

    def distribute(self, full: torch.Tensor, placements: MeshPlacements | None) -> torch.Tensor:
        """A DTensor with the shards of all ranks; without placements, the full tensor on each."""
        with disable_dispatch_modes():
            shards = {rank: self.shard(full, placements or (), rank).clone() for rank in self.ranks}
        local = join_ranks(shards)
        if placements is None:
            return local
        return DTensor.from_local(
            local, self.mesh, placements, run_check=False, shape=full.shape, stride=full.stride()
        )

    def sums_correctly(self) -> bool:
        """Whether a sum over all axes includes every rank: torch skips groups it cannot find."""
        device = torch.device(self.mesh.device_type)
        with disable_dispatch_modes():
            ones = {rank: torch.ones(1, device=device) for rank in self.ranks}
        placements = [Partial()] * self.mesh.ndim
        with all_ranks(self.ranks):
            summed = DTensor.from_local(join_ranks(ones), self.mesh, placements, run_check=False)
            sums = split_ranks(summed.full_tensor())
        with disable_dispatch_modes():
            return all(total.item() == self.num_ranks for total in sums.values())


@final
class SmallMeshes:
    """A small mesh, of ranks of this world, for each mesh shape that calls have."""

    def __init__(self, device_type: str) -> None:
        self._device_type = device_type
        self._groups: list[dist.ProcessGroup] = []
        self._known: dict[tuple[int, ...], SmallMesh | None] = {}

    def find(self, call: Signature) -> SmallMesh | None:
        """The mesh to compute `call` on; None if its tensors are on several, or sums are wrong."""
        meshes = {spec.mesh for _, spec in call.tensors() if spec.mesh is not None}
        return self._make(meshes.pop()) if len(meshes) == 1 else None

    def _make(self, mesh: DeviceMesh) -> SmallMesh | None:
        # Not always two ranks per axis: blocks of this shape must fill the mesh.
        shape = tuple(_smallest_factor(size) for size in mesh.shape)
        if shape not in self._known:
            with disable_dispatch_modes():
                self._known[shape] = self._build(mesh, shape)
        return self._known[shape]

    def _build(self, mesh: DeviceMesh, shape: tuple[int, ...]) -> SmallMesh | None:
        if shape == tuple(mesh.shape) and mesh.device_type == self._device_type:
            small = SmallMesh(mesh, mesh.mesh)
        else:
            size = math.prod(shape)
            # This process's own rank must be among them, or the groups would not be its own, and
            # such blocks must fill the world, or torch would not find the groups of the others.
            start = dist.get_rank() // size * size
            if dist.get_world_size() % size or size > _MAX_RANKS:
                return None
            ranks = torch.arange(start, start + size, device="cpu").reshape(shape)
            small = SmallMesh(DeviceMesh(self._device_type, ranks), ranks)
            self._groups += small.mesh.get_all_groups()
        return small if small.sums_correctly() else None

    def close(self, before: set[str]) -> None:
        """Destroy the process groups that were created for the meshes."""
        for group in self._groups:
            if group.group_name not in before:
                dist.destroy_process_group(group)


def _smallest_factor(size: int) -> int:
    return next((factor for factor in range(2, size) if size % factor == 0), size)


@contextmanager
def small_meshes(mesh: DeviceMesh, device_type: str) -> Iterator[SmallMeshes]:
    """Small meshes on a device that exist until the context ends; `mesh` is not changed."""
    before = {str(group.group_name) for group in mesh.get_all_groups()}
    meshes = SmallMeshes(device_type)
    try:
        yield meshes
    finally:
        meshes.close(before)
