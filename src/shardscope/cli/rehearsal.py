"""Running a program's step under trace, in a simulated world or in the one it was started in."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from shardscope.cli.failure import describe_failure, suggest_remedy
from shardscope.cli.launch import num_launched
from shardscope.cli.target import Program
from shardscope.comm.trace import trace
from shardscope.errors import ShardscopeError, TargetError
from shardscope.record import Recording
from shardscope.report.layout import plural
from shardscope.shard.coverage import cover_step
from shardscope.world import simulate

__all__ = ["Rehearsal", "cover_simulated", "rehearse_real", "rehearse_simulated"]

__frames__ = "outermost"  # whoever called us did not write the program

Report = Callable[[str], None]


@dataclass(frozen=True)
class Rehearsal:
    """What came of a step: its recording, and, if the program failed, how, in a sentence."""

    recording: Recording
    failure: str | None = None
    error: BaseException | None = None


def rehearse_simulated(
    program: Program,
    axes: Mapping[str, int],
    *,
    rank: int,
    has_data: bool = False,
    report: Report = lambda _: None,
) -> Rehearsal:
    """Run the program as `rank` of a simulated world, on tensors without data unless told."""
    with simulate(axes, rank=rank) as world:
        model = _build(program, world.mesh, has_data=has_data, report=report)
        if not has_data:
            if any(isinstance(module, DistributedDataParallel) for module in model.modules()):
                raise TargetError(
                    f"{program.name} wraps its model in DistributedDataParallel, which needs "
                    "tensors with data. Run again with --data."
                )
            world.materialize(model)
        return _run(program, model, has_data=has_data, report=report)


def cover_simulated(
    program: Program,
    axes: Mapping[str, int],
    *,
    levels: Sequence[str],
    has_data: bool = False,
    report: Report = lambda _: None,
) -> Recording:
    """Find what happens to the ops of the program's step, at the placements it gives if any."""
    with simulate(axes) as world:
        model = _build(program, world.mesh, has_data=has_data, report=report)
        with _theirs(program, "batch()", has_data=has_data):
            batch = program.batch(model)
        report("judging its ops")
        with _theirs(program, "step()", has_data=has_data):
            return cover_step(model, program.step, batch, mesh=world.mesh, levels=levels)


def _build(program: Program, mesh: DeviceMesh, *, has_data: bool, report: Report) -> nn.Module:
    report("building the model")
    with (
        _theirs(program, "model()", has_data=has_data),
        torch.device("cpu" if has_data else "meta"),
    ):
        model = program.model()
    return _parallelized(program, model, mesh, has_data=has_data, report=report)


def rehearse_real(
    program: Program, axes: Mapping[str, int] | None, *, report: Report = lambda _: None
) -> Rehearsal:
    """Run the program as the rank that this process was started as."""
    axes = axes or {"dp": num_launched()}
    _check_fits(axes)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    report("meeting the other processes")
    _join_group(device)
    try:
        mesh = init_device_mesh(device, tuple(axes.values()), mesh_dim_names=tuple(axes))
        report("building the model")
        with _theirs(program, "model()"), torch.device(device):
            model = program.model()
        model = _parallelized(program, model, mesh, report=report)
        with torch.device(device):
            return _run(program, model, report=report, mesh=mesh)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _check_fits(axes: Mapping[str, int]) -> None:
    size, num_processes = math.prod(axes.values()), num_launched()
    if size != num_processes:
        raise TargetError(
            f"--mesh has {plural(size, 'rank')}, but {plural(num_processes, 'process', 'es')} "
            f"{'was' if num_processes == 1 else 'were'} started. Make the two agree."
        )


def _join_group(device: str) -> None:
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    if dist.is_initialized():
        return  # the target did so while it was imported
    try:
        dist.init_process_group("nccl" if device == "cuda" else "gloo")
    except (RuntimeError, ValueError, OSError) as error:
        raise TargetError(
            f"The processes did not find each other: {describe_failure(error)}. Check the "
            "launcher, and MASTER_ADDR and MASTER_PORT."
        ) from error


def _parallelized(
    program: Program, model: Any, mesh: DeviceMesh, *, has_data: bool = True, report: Report
) -> nn.Module:
    if not isinstance(model, nn.Module):
        raise TargetError(
            f"{program.name}'s model() returned {type(model).__name__}, not a torch.nn.Module. "
            "Return the model itself."
        )
    if program.parallelize is None:
        return model
    report("sharding the model")
    with _theirs(program, "parallelize()", has_data=has_data):
        sharded = program.parallelize(model, mesh)
    return sharded if isinstance(sharded, nn.Module) else model


def _run(
    program: Program,
    model: nn.Module,
    *,
    has_data: bool = True,
    report: Report,
    mesh: DeviceMesh | None = None,
) -> Rehearsal:
    with _theirs(program, "batch()", has_data=has_data):
        batch = program.batch(model)
    report("running a step")
    traced = trace(model, mesh=mesh)
    try:
        with traced:
            program.step(model, batch)
    except KeyboardInterrupt as error:
        return Rehearsal(traced.recording, "interrupted", error)
    except BaseException as error:  # noqa: BLE001 - a program may raise anything, and sys.exit()
        failure = _explain(program, "step()", error, has_data=has_data)
        return Rehearsal(traced.recording, failure, error)
    return Rehearsal(traced.recording)


@contextmanager
def _theirs(program: Program, part: str, *, has_data: bool = True) -> Iterator[None]:
    """Tell a failure of the user's function from one of ours."""
    try:
        yield
    except (ShardscopeError, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise TargetError(_explain(program, part, error, has_data=has_data)) from error


def _explain(program: Program, part: str, error: BaseException, *, has_data: bool) -> str:
    if isinstance(error, ShardscopeError):
        return f"{program.name}'s {part} failed: {error}"
    remedy = suggest_remedy(error, has_data=has_data)
    return f"{program.name}'s {part} failed: {describe_failure(error)}. {remedy}".rstrip()
