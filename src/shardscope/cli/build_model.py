"""Builds and shards a program's model as a rank of a simulated world or as a launched process."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from shardscope.attribution.failures import describe_failure, suggest_remedy
from shardscope.cli.console import is_launched, num_launched
from shardscope.cli.target import Program
from shardscope.errors import ShardscopeError, TargetError
from shardscope.record.units import plural
from shardscope.world import World, simulate

__frames__ = "outermost"  # our callers are not the user's program

Report = Callable[[str], None]
Inspect = Callable[[nn.Module], None]


@dataclass(frozen=True, kw_only=True)
class BuiltModel:
    """A sharded model in its world."""

    program: Program
    model: nn.Module
    mesh: DeviceMesh
    has_data: bool

    def make_batch(self) -> Any:
        """The program's input for a step."""
        with user_code(self.program, "batch()", has_data=self.has_data):
            return self.program.batch(self.model)


@contextmanager
def build_model(
    program: Program,
    axes: Mapping[str, int] | None,
    *,
    rank: int,
    is_real: bool | None = None,
    has_data: bool = False,
    device: str = "cpu",
    is_materialized: bool = True,
    report: Report = lambda _: None,
    inspect: Inspect = lambda _: None,
) -> Iterator[BuiltModel]:
    """Build and shard the program's model; the world exists until the context ends.

    This process is the rank that a launcher started it as; or, if it was not launched or `is_real`
    is False, `rank` of a simulated world on `device`, on tensors without data (or, not
    materialized, on meta) unless `has_data`. `inspect` is called with the model before it is
    sharded.
    """
    if is_launched() if is_real is None else is_real:
        with _real_model(program, axes, report, inspect) as built:
            yield built
    else:
        assert axes is not None
        _check_rank(rank, axes)
        with simulate(axes, rank=rank, device=device) as world:
            built = _build_simulated(program, world, report, inspect, has_data=has_data)
            if is_materialized and not has_data:
                world.materialize(built.model)
            with torch.device(device) if device != "cpu" else nullcontext():
                yield built


def choose_device(device: str | None, *, has_data: bool) -> str:
    """The device to simulate: CUDA, unless tensors have data and there is no GPU to hold them."""
    if not has_data:
        return device or "cuda"
    if device == "cuda" and not torch.cuda.is_available():
        raise TargetError(
            "--data computes with real numbers, and this machine has no GPU for --device cuda. "
            "Remove one of the two options."
        )
    return device or ("cuda" if torch.cuda.is_available() else "cpu")


def build_alone(
    program: Program, report: Report = lambda _: None, *, seed: int
) -> tuple[nn.Module, Any]:
    """Build the program's model and its input for a single device, without sharding."""
    report("building the model")
    torch.manual_seed(seed)
    with user_code(program, "model()"):
        model = program.model()
    if not isinstance(model, nn.Module):
        raise TargetError(
            f"{program.name}'s model() returned {type(model).__name__}, not a torch.nn.Module. "
            "Return the model itself."
        )
    with user_code(program, "batch()"):
        return model, program.batch(model)


def _build_simulated(
    program: Program, world: World, report: Report, inspect: Inspect, *, has_data: bool
) -> BuiltModel:
    report("building the model")
    with (
        user_code(program, "model()", has_data=has_data),
        torch.device(world.mesh.device_type if has_data else "meta"),
    ):
        model = program.model()
    with nullcontext() if has_data else _materialized_for_ddp(world):
        model = _parallelized(program, model, world.mesh, report, inspect, has_data=has_data)
    return BuiltModel(program=program, model=model, mesh=world.mesh, has_data=has_data)


@contextmanager
def _materialized_for_ddp(world: World) -> Iterator[None]:
    """Materialize models when DDP wraps them: it reads shapes and broadcasts tensors then."""
    make = DistributedDataParallel.__init__

    @functools.wraps(make)
    def make_materialized(
        self: DistributedDataParallel, module: nn.Module, *args: Any, **kwargs: Any
    ) -> None:
        make(self, world.materialize(module), *args, **kwargs)

    DistributedDataParallel.__init__ = make_materialized  # type: ignore[method-assign]
    try:
        yield
    finally:
        DistributedDataParallel.__init__ = make  # type: ignore[method-assign]


@contextmanager
def _real_model(
    program: Program, axes: Mapping[str, int] | None, report: Report, inspect: Inspect
) -> Iterator[BuiltModel]:
    axes = axes or {"dp": num_launched()}
    _check_fits(axes)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    report("connecting to the other processes")
    _join_group(device)
    try:
        mesh = init_device_mesh(device, tuple(axes.values()), mesh_dim_names=tuple(axes))
        report("building the model")
        with user_code(program, "model()"), torch.device(device):
            model = program.model()
        model = _parallelized(program, model, mesh, report, inspect)
        with torch.device(device):
            yield BuiltModel(program=program, model=model, mesh=mesh, has_data=True)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _check_fits(axes: Mapping[str, int]) -> None:
    size, num_processes = math.prod(axes.values()), num_launched()
    if size != num_processes:
        raise TargetError(
            f"--mesh has {plural(size, 'rank')}, but {plural(num_processes, 'process', 'es')} "
            f"{'was' if num_processes == 1 else 'were'} started. Give --mesh axes whose "
            f"sizes multiply to {num_processes:,}, or start {plural(size, 'process', 'es')}."
        )


def _check_rank(rank: int, axes: Mapping[str, int]) -> None:
    size = math.prod(axes.values())
    if not 0 <= rank < size:
        raise TargetError(
            f"--rank is {rank:,}, but the mesh has ranks 0 to {size - 1:,}. Choose one of those."
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
            f"The processes could not connect: {describe_failure(error)}. Check the "
            "launcher, and MASTER_ADDR and MASTER_PORT."
        ) from error


def _parallelized(
    program: Program,
    model: Any,
    mesh: DeviceMesh,
    report: Report,
    inspect: Inspect,
    *,
    has_data: bool = True,
) -> nn.Module:
    if not isinstance(model, nn.Module):
        raise TargetError(
            f"{program.name}'s model() returned {type(model).__name__}, not a torch.nn.Module. "
            "Return the model itself."
        )
    inspect(model)
    if program.parallelize is None:
        return model
    report("sharding the model")
    with user_code(program, "parallelize()", has_data=has_data):
        sharded = program.parallelize(model, mesh)
    return sharded if isinstance(sharded, nn.Module) else model


@contextmanager
def user_code(program: Program, part: str, *, has_data: bool = True) -> Iterator[None]:
    """Turn errors of the user's function into a TargetError that names it."""
    try:
        yield
    except (ShardscopeError, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise TargetError(explain_failure(program, part, error, has_data=has_data)) from error


def explain_failure(program: Program, part: str, error: BaseException, *, has_data: bool) -> str:
    """A sentence with the error of the user's function, and a remedy if one is known."""
    if isinstance(error, ShardscopeError):
        return f"{program.name}'s {part} failed: {error}"
    remedy = suggest_remedy(error, has_data=has_data)
    return f"{program.name}'s {part} failed: {describe_failure(error)}. {remedy}".rstrip()
