"""A TARGET as a training program: `python -m shardscope.cli.target_program TARGET MESH AXES`.

`check` launches it as each rank. It makes the mesh, builds and shards the model and takes training
steps, with a batch of its own along the batch axes, AXES. Steps end when the launcher ends them.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardscope.cli.mesh_option import parse_mesh
from shardscope.cli.target import Program, load_program
from shardscope.parallel.equivalence import Training

__frames__ = "outermost"  # our callers are not the user's program

BATCH_AXES = ("batch", "data", "ddp", "dp", "fsdp", "hsdp", "replicate", "shard")
"""Names of mesh axes along which ranks have batches of their own, unless others are named."""
_NUM_STEPS = 8


def main(arguments: Sequence[str]) -> None:
    """Run the TARGET as the rank of this process."""
    target, mesh, names = arguments
    axes = parse_mesh(mesh)
    program = load_program(target)
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl")
    world_mesh = init_device_mesh("cuda", tuple(axes.values()), mesh_dim_names=tuple(axes))
    torch.manual_seed(0)
    model: Any = program.model().to(device)
    if program.parallelize is not None:
        model = program.parallelize(model, world_mesh) or model
    optimizer = _make_optimizer(program, model)
    batch_axes = [name for name in axes if name in names.split(",")]
    index = _find_index(world_mesh, batch_axes)
    for step in range(_NUM_STEPS):
        torch.manual_seed(1 + step * math.prod(axes.values()) + index)
        with device:
            batch = program.batch(model)
        _take_step(program, model, batch, optimizer, world_mesh)
    dist.destroy_process_group()


def _make_optimizer(program: Program, model: Any) -> Any:
    if program.optimizer is not None:
        return program.optimizer(model)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.SGD(parameters, lr=1e-3) if parameters else None


def _find_index(mesh: DeviceMesh, batch_axes: Sequence[str]) -> int:
    """The position of this rank along the batch axes."""
    index = 0
    for name in batch_axes:
        axis = mesh[name]
        index = index * axis.size() + axis.get_local_rank()
    return index


def _take_step(program: Program, model: Any, batch: Any, optimizer: Any, mesh: DeviceMesh) -> None:
    step = program.parallel_train_step or program.train_step
    if step is not None:
        Training(step, step).run(model, batch, optimizer, mesh=mesh)
        return
    program.step(model, batch)
    if optimizer is not None:
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main(sys.argv[1:])
