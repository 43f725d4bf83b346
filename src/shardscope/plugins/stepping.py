"""Running a step in a simulated world, for those who assert something about it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from inspect import Parameter, signature
from typing import Any, TypeAlias

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardscope.comm.trace import trace
from shardscope.errors import ContractError
from shardscope.record import Recording
from shardscope.world import current_world, simulate

__all__ = ["Mesh", "Model", "Step", "built_model", "call_step", "find_recordings", "trace_step"]

__frames__ = "outermost"  # whoever called us did not write the step

Mesh: TypeAlias = Mapping[str, int] | DeviceMesh | None
"""Axes of a world to simulate, or the mesh of the one that there is."""

Model: TypeAlias = nn.Module | Callable[[DeviceMesh], nn.Module] | None
"""The model whose names count, or a function that builds and shards it for a mesh."""

Step: TypeAlias = Callable[..., object]
"""What to run: `step()` or `step(model)`."""


def find_recordings(given: Any) -> list[Recording] | None:
    """The recordings in what an assertion was given, or None if it is something to run."""
    if isinstance(given, Recording):
        return [given]
    if isinstance(given, Sequence) and not isinstance(given, str):
        found = [find_recordings(one) for one in given]
        if any(one is None for one in found):
            return None
        return [recording for some in found if some is not None for recording in some]
    held = getattr(given, "recording", None)
    held = held() if callable(held) else held
    return [held] if isinstance(held, Recording) else None


def trace_step(step: Step, *, model: Model, mesh: Mesh, rank: int) -> Recording:
    """What a step says, in the world that there is or in a simulated one."""
    with built_model(model, mesh=mesh, rank=rank) as (built, own_mesh):
        traced = trace(built, mesh=own_mesh)
        with traced:
            call_step(step, built)
        return traced.recording


@contextmanager
def built_model(
    model: Model, *, mesh: Mesh, rank: int = 0
) -> Iterator[tuple[nn.Module | None, DeviceMesh | None]]:
    """The model in its world, and the world's mesh; one that was built on meta gets tensors."""
    with _in_world(mesh, rank) as own_mesh:
        if model is not None and not isinstance(model, nn.Module):
            model = _build(model, own_mesh)
        world = current_world()
        if world is not None and model is not None and _is_on_meta(model):
            world.materialize(model)
        yield model, own_mesh


def call_step(step: Step, model: nn.Module | None) -> object:
    """`step(model)` if it takes one, else `step()`."""
    return step(model) if model is not None and _takes_model(step) else step()


@contextmanager
def _in_world(mesh: Mesh, rank: int) -> Iterator[DeviceMesh | None]:
    world = current_world()
    if isinstance(mesh, DeviceMesh):
        yield mesh
    elif world is not None:
        _check_same_axes(mesh, world.axes)
        yield world.mesh
    elif mesh is not None:
        with simulate(mesh, rank=rank) as made:
            yield made.mesh
    elif dist.is_initialized():
        yield None
    else:
        raise ContractError(
            "There is no world for the step to run in. Name the axes of one to simulate, "
            'mesh={"dp": 2, "tp": 4}, or use the fixture shardscope_world.'
        )


def _check_same_axes(mesh: Mapping[str, int] | None, axes: Mapping[str, int]) -> None:
    if mesh is not None and dict(mesh) != dict(axes):
        raise ContractError(
            f"mesh={dict(mesh)} was asked for in a simulated world of {dict(axes)}. Leave mesh "
            "out, or leave that world first."
        )


def _build(model: Callable[..., Any], mesh: DeviceMesh | None) -> nn.Module:
    built = model(mesh)
    if not isinstance(built, nn.Module):
        raise ContractError(
            f"model= returned {type(built).__name__} where it should build and shard the model for "
            "a mesh. Return the model itself."
        )
    return built


def _is_on_meta(model: nn.Module) -> bool:
    return any(one.is_meta for one in (*model.parameters(), *model.buffers()))


def _takes_model(step: Step) -> bool:
    try:
        parameters = signature(step).parameters.values()
    except (TypeError, ValueError):
        return False
    takes = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD, Parameter.VAR_POSITIONAL)
    return any(one.kind in takes and one.default is Parameter.empty for one in parameters)
