"""Runs a correct program of `benchmarks/silent` as a rank: torchrun silent_ranks.py NAME."""

import math
import os
import sys
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist
from benchmarks.silent.correct import PROGRAMS
from torch.distributed.device_mesh import init_device_mesh


def shard(batch, program, mesh):
    """This rank's part of the batch along the layout's batch axes."""
    number, index = 1, 0
    for axis in program.layout.batch_axes:
        number *= program.layout.mesh[axis]
        index = index * program.layout.mesh[axis] + mesh.get_local_rank(axis)
    dim = program.layout.batch_dim
    return {name: tensor.tensor_split(number, dim)[index] for name, tensor in batch.items()}


def main(name):
    program = PROGRAMS[name]
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    shape = tuple(program.layout.mesh.values())
    assert math.prod(shape) == int(os.environ["WORLD_SIZE"])
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=tuple(program.layout.mesh))
    torch.manual_seed(0)
    model = program.layout.parallelize(program.make_model(), mesh) or program.make_model()
    trainer = program.make_trainer(model)
    for batch in program.make_batches():
        program.rank_step(model, shard(batch, program, mesh), trainer, mesh=mesh)
    print(f"{name}: done")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
