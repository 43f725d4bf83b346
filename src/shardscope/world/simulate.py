"""A world of any size in one process: this process is one of its ranks, and nothing is sent."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TypeVar

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from shardscope._torch.intercept import intercept
from shardscope._torch.pipelining import lonely_stages
from shardscope._torch.rank_maps import shared_rank_maps
from shardscope._torch.simulated_group import (
    coalesced_ops_on_fake_tensors,
    fake_tensors,
    simulated_group,
    uncopied_mismatches,
)
from shardscope.errors import WorldError
from shardscope.world.checks import CollectiveChecker
from shardscope.world.objects import simulated_object_collectives
from shardscope.world.ties import kept_ties

__all__ = ["World", "current_world", "simulate"]

ModelT = TypeVar("ModelT", bound=nn.Module)

_current: World | None = None


class World:
    """A simulated world, seen from one of its ranks."""

    def __init__(self, axes: Mapping[str, int], rank: int, mesh: DeviceMesh) -> None:
        self.axes = dict(axes)
        self.rank = rank
        self.size = math.prod(axes.values())
        self.mesh = mesh
        self._stack = ExitStack()
        self._is_fake = False

    def __repr__(self) -> str:
        mesh = ", ".join(f"{name}={size}" for name, size in self.axes.items())
        return f"World({mesh}; rank {self.rank} of {self.size})"

    def materialize(self, model: ModelT) -> ModelT:
        """Give `model`, built on meta, tensors with shapes but no data, and return it.

        From here to the world's end every new tensor is such a tensor, so that a step of a model
        of any size costs neither memory nor arithmetic. Shard and slice meshes before, not after.
        """
        if any(isinstance(module, DistributedDataParallel) for module in model.modules()):
            raise WorldError(
                "materialize() got a model wrapped in DistributedDataParallel, whose reducer reads "
                "data that simulated tensors do not have. Build the model with real tensors "
                "instead, and run it in the simulated world without materialize()."
            )
        if not self._is_fake:
            self._stack.enter_context(fake_tensors())
            self._is_fake = True
        if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
            with kept_ties(model):
                model.to_empty(device=self.mesh.device_type)
        return model

    def _close(self) -> None:
        self._stack.close()


def current_world() -> World | None:
    """The simulated world this process is in, or None."""
    return _current


@contextmanager
def simulate(mesh: Mapping[str, int], *, rank: int = 0, device: str = "cpu") -> Iterator[World]:
    """Make this process rank `rank` of a simulated world whose mesh has these axes.

    `torch.distributed` behaves as on that rank, at any size, and sends nothing; what a real group
    would refuse is refused. On leaving, also by an exception, everything is as before.
    """
    global _current
    axes = _checked_axes(mesh)
    _check_can_start(axes, rank)
    with ExitStack() as stack:
        stack.enter_context(simulated_group(rank, math.prod(axes.values())))
        stack.enter_context(shared_rank_maps())
        device_mesh = init_device_mesh(device, tuple(axes.values()), mesh_dim_names=tuple(axes))
        stack.enter_context(coalesced_ops_on_fake_tensors())
        stack.enter_context(uncopied_mismatches())
        stack.enter_context(simulated_object_collectives())
        stack.enter_context(lonely_stages())
        stack.enter_context(intercept(CollectiveChecker()))
        world = World(axes, rank, device_mesh)
        stack.callback(world._close)
        _current = world
        try:
            yield world
        finally:
            _current = None


def _checked_axes(mesh: Mapping[str, int]) -> dict[str, int]:
    if not isinstance(mesh, Mapping) or not mesh:
        raise WorldError(
            f"simulate() got mesh={mesh!r}, which names no axis. "
            'Give axis names and sizes, for example mesh={"dp": 8, "tp": 4}.'
        )
    for name, size in mesh.items():
        if not isinstance(name, str) or not name:
            raise WorldError(f"simulate() got the axis name {name!r}. Axis names are strings.")
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise WorldError(
                f"simulate() got the size {size!r} for axis {name!r}. "
                "An axis has a whole number of ranks, at least one."
            )
    return dict(mesh)


def _check_can_start(axes: Mapping[str, int], rank: int) -> None:
    size = math.prod(axes.values())
    if not isinstance(rank, int) or isinstance(rank, bool) or not 0 <= rank < size:
        shape = " × ".join(f"{name}={n}" for name, n in axes.items())
        raise WorldError(
            f"simulate() got rank={rank!r}, but the mesh {shape} has ranks 0 to {size - 1}. "
            "Choose one of those."
        )
    if _current is not None:
        raise WorldError(
            f"simulate() was called inside another simulated world ({_current!r}). "
            "Leave that one first: worlds follow one another, they do not nest."
        )
    if dist.is_initialized():
        raise WorldError(
            f"simulate() needs a process without a process group, and this one has one "
            f"({dist.get_backend()}, {dist.get_world_size()} ranks). Call "
            "torch.distributed.destroy_process_group() first, or trace() the real run instead."
        )
