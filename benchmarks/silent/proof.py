"""Proves that a training program is right: gloo processes against a single device, in float64.

Nothing of shardscope is used. After all steps, every updated parameter on the ranks is compared
with the single device's; what the ranks disagree on is compared rank by rank.
"""

from __future__ import annotations

import math
import os
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from benchmarks.silent.correct import PROGRAMS, Program, Script
from benchmarks.silent.correct_models import Batch
from benchmarks.silent.correct_steps import plain_name
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

LIMIT = 1e-9  # of the error, relative to the largest element of a tensor
_TIMEOUT = timedelta(seconds=60)
Parameters = dict[str, Tensor]


def prove(names: Sequence[str]) -> int:
    """Prove each program, print those that are wrong or fail; 1 if there are any."""
    errors = measure_errors(names)
    num_wrong = 0
    for name, error in errors.items():
        if not isinstance(error, float) or not error <= LIMIT:
            num_wrong += 1
            print(f"{name}: {error}", flush=True)
    largest = max((e for e in errors.values() if isinstance(e, float)), default=0.0)
    print(
        f"{len(errors)} programs, {num_wrong} wrong or failed; the largest relative error of an "
        f"updated parameter is {largest:.1e}"
    )
    return int(num_wrong > 0)


def measure_errors(names: Sequence[str]) -> dict[str, float | str]:
    """The largest relative error of an updated parameter of each program, or its failure."""
    by_size: dict[int, list[str]] = {}
    for name in names:
        by_size.setdefault(math.prod(PROGRAMS[name].layout.mesh.values()), []).append(name)
    errors: dict[str, float | str] = {}
    for size, group in by_size.items():
        remaining = group
        while remaining:
            results = _run_processes(size, remaining)
            errors |= results
            done = len(results)
            if done < len(remaining):
                errors.setdefault(remaining[done], "the processes ended")
                done += 1
            remaining = remaining[done:]
    return {name: errors[name] for name in names}


def _run_processes(size: int, names: Sequence[str]) -> dict[str, float | str]:
    """Run programs on `size` processes, until a program fails."""
    with tempfile.TemporaryDirectory() as folder:
        context = mp.spawn(_run_rank, (size, folder, list(names)), nprocs=size, join=False)
        while not context.join(grace_period=5):
            pass
        path = os.path.join(folder, "errors")
        return torch.load(path) if os.path.exists(path) else {}


def _run_rank(rank: int, size: int, folder: str, names: Sequence[str]) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    errors: dict[str, float | str] = {}
    store = dist.FileStore(os.path.join(folder, "store"), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=_TIMEOUT)
    for name in names:
        program = PROGRAMS[name]
        try:
            mesh = init_device_mesh(
                "cpu",
                tuple(program.layout.mesh.values()),
                mesh_dim_names=tuple(program.layout.mesh),
            )
            errors[name] = compare(program, mesh)
        except Exception as failure:  # noqa: BLE001 - a failure is a result
            errors[name] = f"{type(failure).__name__}: {failure!s:.300}"
        failed: list[Any] = [None] * size
        dist.all_gather_object(failed, errors[name] if isinstance(errors[name], str) else None)
        errors[name] = next((text for text in failed if text), errors[name])
        if rank == 0:
            torch.save(errors, os.path.join(folder, "errors"))
        if isinstance(errors[name], str):
            break  # messages may be left between the ranks
    os._exit(0)


def compare(program: Program | Script, mesh: DeviceMesh) -> float:
    """The largest error, over all ranks and parameters, relative to the largest element."""
    single = run_single(program)
    local = run_rank(program, mesh)
    worst = 0.0
    for name, value in local.items():
        error = (value - single[name]).abs().max() / single[name].abs().max().clamp(min=1e-30)
        worst = max(worst, float(error))
    results: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(results, (worst, sorted(local)))
    seen = set().union(*(names for _, names in results))
    assert seen == set(single), f"no rank has {set(single) - seen}; {seen - set(single)} is new"
    return float(max(error for error, _ in results))


def make_model(program: Program | Script) -> nn.Module:
    """The model in double precision, without dropout, whose ranks draw different numbers."""
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    model = program.make_model().double()
    torch.set_default_dtype(dtype)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


def make_batches(program: Program | Script) -> list[Batch]:
    """The batches in double precision."""
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    batches = program.make_batches()
    torch.set_default_dtype(dtype)
    return [
        {name: t.double() if t.is_floating_point() else t for name, t in batch.items()}
        for batch in batches
    ]


def run_single(program: Program | Script) -> Parameters:
    """The parameters after all steps of a single device."""
    model = make_model(program)
    trainer = program.make_trainer(model)
    for batch in make_batches(program):
        program.train_step(model, batch, trainer)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def run_rank(program: Program | Script, mesh: DeviceMesh) -> Parameters:
    """The parameters after all steps of this rank; those of shards are gathered."""
    layout = program.layout
    if hasattr(layout, "dtype"):
        layout.dtype = None  # the policy would round to half precision
    model = layout.parallelize(make_model(program), mesh)
    trainer = program.make_trainer(model)
    for batch in make_batches(program):
        program.rank_step(model, shard(batch, program, mesh), trainer, mesh=mesh)
    full: Parameters = {}
    for name, parameter in model.named_parameters():
        value = parameter.detach()
        if isinstance(value, DTensor):
            value = value.full_tensor()
        for axis, dim in layout.sharded_axes(plain_name(name)).items():
            value = gather(value, mesh, axis, dim)
        full[plain_name(name)] = value
    return full


def gather(value: Tensor, mesh: DeviceMesh, axis: str, dim: int) -> Tensor:
    """The tensor of which each rank along a mesh axis has a part."""
    parts: list[Any] = [None] * mesh[axis].size()
    dist.all_gather_object(parts, value, group=mesh.get_group(axis))
    return torch.cat(parts, dim)


def shard(batch: Batch, program: Program | Script, mesh: DeviceMesh) -> Batch:
    """This rank's part of the batch along the layout's batch axes."""
    layout: Mapping[str, int] = program.layout.mesh
    number, index = 1, 0
    for axis in program.layout.batch_axes:
        number *= layout[axis]
        index = index * layout[axis] + mesh.get_local_rank(axis)
    return {
        name: tensor.tensor_split(number, program.layout.batch_dim)[index]
        for name, tensor in batch.items()
    }
