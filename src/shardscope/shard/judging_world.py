"""The simulated world that ops are judged in: the one there is, or one of their own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardscope._torch.cuda_runtime import is_simulated
from shardscope._torch.meshes import meshes_of
from shardscope.errors import CoverageError
from shardscope.world import current_world, simulate

__all__ = ["judging_world"]

_DEFAULT_MESH = {"tp": 2}


@contextmanager
def judging_world(
    model: nn.Module, mesh: Mapping[str, int] | DeviceMesh | None
) -> Iterator[DeviceMesh]:
    """The mesh to judge on, in a world of its own unless there is one."""
    if is_simulated():
        raise CoverageError(
            'coverage() was called within simulate(device="cuda") on a machine without a GPU, '
            "where the ops cannot be computed. Call it outside of that block, or within "
            'simulate(device="cpu").'
        )
    if isinstance(mesh, DeviceMesh):
        yield mesh
    elif dist.is_initialized():
        yield _mesh_of_world(model, mesh)
    else:
        axes = _DEFAULT_MESH if mesh is None else mesh
        with simulate(axes, device=_device_type(model)) as world:
            yield world.mesh


def _device_type(model: nn.Module) -> str:
    """Where the model is; kernels differ by device."""
    types = {tensor.device.type for tensor in model.parameters()} - {"meta", "cpu"}
    return types.pop() if len(types) == 1 else "cpu"


def _mesh_of_world(model: nn.Module, mesh: Mapping[str, int] | None) -> DeviceMesh:
    if dist.get_backend() != "fake":
        raise CoverageError(
            f"coverage() was called in a process group of {dist.get_world_size()} real ranks "
            f"({dist.get_backend()}). Call it in one process by itself, or within simulate()."
        )
    world = current_world()
    found = next(meshes_of(model), None) or (None if world is None else world.mesh)
    if found is None:
        raise CoverageError(
            "coverage() was called in a fake process group, and the model is on no mesh. Give "
            "it one: coverage(model, …, mesh=init_device_mesh(…))."
        )
    if mesh is not None and world is not None and dict(mesh) != world.axes:
        raise CoverageError(
            f"coverage() got mesh={dict(mesh)!r} within a world whose mesh is {world.axes!r}. "
            "Leave it out there."
        )
    return found
