"""torch's tensor_parallel_transformation with our partitioner: same name and signature."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.export import ExportedProgram

from shardscope.errors import ParallelError
from shardscope.parallel.api import check_program
from shardscope.parallel.ir.mesh import Mesh
from shardscope.parallel.partition import partition_program
from shardscope.parallel.plan import ResolvedPlan, index_program, resolve
from shardscope.plan import Plan

_FIRST_GROUP = "0"  # what torch calls the group of all ranks, on each of them
_LAUNCHED = frozenset({"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"})


def tensor_parallel_transformation(
    exported_program: ExportedProgram,
    rank: int,
    world_size: int,
    device_type: str,
    parallel_strategies: Any,
) -> ExportedProgram:
    """The program of one rank, with its shards of the weights; inputs and outputs are replicated.

    The given program is not changed. The result is not verified, because every process would run
    the programs of all ranks: `parallelize` does that. Collectives use the default process group,
    which is initialized if the environment describes one, or else the first that is initialized
    later.

    Args:
        exported_program: The single-device program.
        rank: The rank.
        world_size: The number of ranks.
        device_type: The device type of the mesh.
        parallel_strategies: Styles by module name or pattern: everything that a `Plan` takes.

    Examples:
        >>> strategies = {"up": ColwiseParallel, "down": RowwiseParallel}
        >>> program = tensor_parallel_transformation(exported, 0, 4, "cpu", strategies)
    """
    check_program(exported_program)
    plan = Plan.of(parallel_strategies)
    _check_rank(rank, world_size)
    axes = {"tp": world_size}
    is_empty = not (plan.entries or plan.inputs or plan.outputs)
    resolved = (
        ResolvedPlan(axes) if is_empty else resolve(plan, index_program(exported_program), axes)
    )
    mesh = _make_mesh(axes, world_size, device_type)
    return partition_program(exported_program, mesh, resolved).exported(rank)


def _check_rank(rank: int, world_size: int) -> None:
    if not 0 <= rank < world_size:
        raise ParallelError(
            f"rank is {rank}, but world_size is {world_size}: ranks are counted from 0. Give the "
            "rank that the program is for, and the number of all of them."
        )


def _make_mesh(axes: dict[str, int], world_size: int, device_type: str) -> Mesh:
    ranks = torch.arange(world_size)
    name = _group_name(world_size, device_type)
    return Mesh(axes, ranks, group_names={tuple(range(world_size)): name})


def _group_name(world_size: int, device_type: str) -> str:
    """The name by which every rank's program calls the group of the first `world_size` ranks."""
    if not dist.is_initialized() and not os.environ.keys() >= _LAUNCHED:
        return _FIRST_GROUP
    if dist.is_initialized() and dist.get_world_size() < world_size:
        raise ParallelError(
            f"world_size is {world_size}, but the process group has {dist.get_world_size()} ranks. "
            "Start as many processes, or make the programs before the process group."
        )
    mesh = DeviceMesh(device_type, torch.arange(world_size))
    return _FIRST_GROUP if mesh.get_coordinate() is None else str(mesh.get_group().group_name)
