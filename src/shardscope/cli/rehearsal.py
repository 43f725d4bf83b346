"""Running a program's step under trace, in a simulated world or in the one it was started in."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from shardscope.cli.target import Program, describe_failure
from shardscope.comm.trace import trace
from shardscope.errors import ShardscopeError, TargetError
from shardscope.record import Recording
from shardscope.world import simulate

__all__ = ["Rehearsal", "is_launched", "parse_mesh", "rehearse_real", "rehearse_simulated"]

__frames__ = "outermost"  # whoever called us did not write the program

Report = Callable[[str], None]


@dataclass(frozen=True)
class Rehearsal:
    """What came of a step: its recording, and, if the program failed, how."""

    recording: Recording
    failure: str | None = None
    error: BaseException | None = None


def parse_mesh(text: str) -> dict[str, int]:
    """`dp=8,tp=4` as axes."""
    axes: dict[str, int] = {}
    for part in text.split(","):
        name, equals, size = (piece.strip() for piece in part.partition("="))
        if not name or not equals or not size.isdecimal() or int(size) < 1:
            raise TargetError(
                f"--mesh {text!r} is not understood at {part.strip()!r}. Give the name and size "
                "of each axis, such as --mesh dp=8,tp=4."
            )
        if name in axes:
            raise TargetError(f"--mesh {text!r} names the axis {name!r} twice. Name each once.")
        axes[name] = int(size)
    return axes


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
        report("building the model")
        with _theirs(program, "model()"), torch.device("cpu" if has_data else "meta"):
            model = program.model()
        model = _parallelized(program, model, world.mesh, report)
        if not has_data:
            if any(isinstance(module, DistributedDataParallel) for module in model.modules()):
                raise TargetError(
                    f"{program.name} wraps its model in DistributedDataParallel, which needs "
                    "tensors with data. Run again with --data."
                )
            world.materialize(model)
        return _run(program, model, report)


def is_launched() -> bool:
    """Whether torchrun, or something like it, started this process as one of several."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def rehearse_real(
    program: Program, axes: Mapping[str, int] | None, *, report: Report = lambda _: None
) -> Rehearsal:
    """Run the program as the rank that this process was started as."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    try:
        axes = axes or {"dp": dist.get_world_size()}
        _check_fits(axes)
        mesh = init_device_mesh(device, tuple(axes.values()), mesh_dim_names=tuple(axes))
        report("building the model")
        with _theirs(program, "model()"), torch.device(device):
            model = program.model()
        model = _parallelized(program, model, mesh, report)
        with torch.device(device):
            return _run(program, model, report, mesh)
    finally:
        dist.destroy_process_group()


def _check_fits(axes: Mapping[str, int]) -> None:
    size = 1
    for num_ranks in axes.values():
        size *= num_ranks
    if size != dist.get_world_size():
        raise TargetError(
            f"--mesh has {size} ranks, but {dist.get_world_size()} processes were started. "
            "Make the two agree."
        )


def _parallelized(program: Program, model: Any, mesh: DeviceMesh, report: Report) -> nn.Module:
    if not isinstance(model, nn.Module):
        raise TargetError(
            f"{program.name}'s model() returned {type(model).__name__}, not a torch.nn.Module. "
            "Return the model itself."
        )
    if program.parallelize is None:
        return model
    report("sharding the model")
    is_meta = any(tensor.is_meta for tensor in model.parameters())
    remedy = (
        " If it needs tensors with data, as DDP does, run again with --data." if is_meta else ""
    )
    with _theirs(program, "parallelize()", remedy):
        sharded = program.parallelize(model, mesh)
    return sharded if isinstance(sharded, nn.Module) else model


def _run(
    program: Program, model: nn.Module, report: Report, mesh: DeviceMesh | None = None
) -> Rehearsal:
    with _theirs(program, "batch()"):
        batch = program.batch(model)
    report("running a step")
    traced = trace(model, mesh=mesh)
    try:
        with traced:
            program.step(model, batch)
    except ShardscopeError as error:
        return Rehearsal(traced.recording, str(error), error)
    except Exception as error:  # noqa: BLE001 - the user's program may raise anything
        return Rehearsal(traced.recording, describe_failure(error), error)
    return Rehearsal(traced.recording)


@contextmanager
def _theirs(program: Program, part: str, remedy: str = "") -> Iterator[None]:
    """Tell a failure of the user's function from one of ours."""
    try:
        yield
    except ShardscopeError:
        raise
    except Exception as error:
        fact = f"{program.name}'s {part} failed: {describe_failure(error)}."
        raise TargetError(fact + remedy) from error
