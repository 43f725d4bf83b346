"""`coverage(model, …)`: which of a model's ops shard, what each costs, what blocks sharding first.

Ops are captured eagerly, each distinct call is taken apart, dispatched on DTensors and computed
once; see docs/decisions/0005.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardscope._torch.meshes import axis_names, meshes_of
from shardscope._torch.modules import unwrap
from shardscope._torch.propagation import kept_propagator
from shardscope.errors import CoverageError
from shardscope.record import (
    Axis,
    Coverage,
    Gap,
    Level,
    RankSpan,
    Recording,
    RunInfo,
)
from shardscope.shard.capture import Capture, Use
from shardscope.shard.dispatch import Dispatcher
from shardscope.shard.flops import FlopCounter
from shardscope.shard.levels import take_apart
from shardscope.shard.numbers import Checker
from shardscope.shard.plan import Plan, parallelize_copy, read_layout
from shardscope.shard.running import Captured, Program, run_model
from shardscope.shard.small_mesh import small_meshes
from shardscope.shard.stand_ins import empty_like
from shardscope.shard.summary import Summary
from shardscope.shard.trials import Tryer
from shardscope.shard.verdicts import Judge
from shardscope.version import __version__
from shardscope.world import current_world, simulate

__all__ = ["coverage"]

_DEFAULT_MESH = {"tp": 2}
_LEVELS = tuple(Level)
# DTensor's caches, the process group and nn.Module's call are one for all threads.
_lock = threading.RLock()


def coverage(
    model: nn.Module,
    *args: Any,
    mesh: Mapping[str, int] | DeviceMesh | None = None,
    plan: Plan | None = None,
    loss: Callable[[Any], Any] | None = None,
    levels: Sequence[Level | str] = _LEVELS,
    **kwargs: Any,
) -> Recording:
    """Find what happens to each op of `model(*args, **kwargs)` and of its backward when sharded.

    >>> save(coverage(model, tokens), "coverage.json.gz")

    Verdicts are what DTensor does on `mesh`, a simulated one such as `{"tp": 2}`: at the
    placements of a model that is sharded already, or that `plan` says (placements by patterns of
    parameter names, or a function of model and mesh), or else with each dim of each input sharded
    in turn. Backward begins at every output that has a gradient, or at what `loss` makes of the
    output. Nothing is computed but small samples, and the model is left as it was.
    """
    chosen = _read_levels(levels)
    if not isinstance(model, nn.Module):
        raise CoverageError(
            f"coverage() got {type(model).__name__} where it wants a module. Give it a model, then "
            "what to call it with: coverage(model, tokens)."
        )
    with _lock, ExitStack() as stack:
        stack.enter_context(kept_propagator())
        own_mesh = stack.enter_context(_world(model, mesh))
        return _cover(unwrap(model), args, kwargs, own_mesh, plan, loss, chosen)


def _read_levels(levels: Sequence[Level | str]) -> list[Level]:
    names = [levels] if isinstance(levels, str) else levels
    try:
        return [level for level in Level if level in {Level(name) for name in names}]
    except ValueError:
        raise CoverageError(
            f"coverage() got levels={levels!r:.80}. The levels are {', '.join(Level)}."
        ) from None


@contextmanager
def _world(model: nn.Module, mesh: Mapping[str, int] | DeviceMesh | None) -> Iterator[DeviceMesh]:
    """The mesh to judge on, in a world of its own unless there is one."""
    if isinstance(mesh, DeviceMesh):
        yield mesh
    elif dist.is_initialized():
        yield _mesh_of_world(model, mesh)
    else:
        with simulate(_DEFAULT_MESH if mesh is None else mesh) as world:
            yield world.mesh


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
            "coverage() was called in a fake process group, and the model lies on no mesh. Give "
            "it one: coverage(model, …, mesh=init_device_mesh(…))."
        )
    if mesh is not None and world is not None and dict(mesh) != world.axes:
        raise CoverageError(
            f"coverage() got mesh={dict(mesh)!r} within a world whose mesh is {world.axes!r}. "
            "Leave it out there."
        )
    return found


def _cover(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    mesh: DeviceMesh,
    plan: Plan | None,
    loss: Callable[[Any], Any] | None,
    levels: list[Level],
) -> Recording:
    gaps: dict[tuple[str, str], None] = {}

    def report(place: str, fact: str) -> None:
        gaps[place, fact] = None

    device = torch.device(mesh.device_type)
    if callable(plan) and not isinstance(plan, Mapping):
        model = parallelize_copy(model, plan, mesh)
    is_laid_out = isinstance(plan, Mapping)
    has_plan = is_laid_out or any(isinstance(one, DTensor) for one in model.parameters())
    dispatcher = Dispatcher(device=device, is_implicit=is_laid_out)
    program = Program(model, args, kwargs, loss, _stand_in_maker(model, plan, mesh, device))
    with dispatcher.implicit():
        captured = run_model(program, report)
    with small_meshes(mesh) as meshes, dispatcher.watching():
        judge = Judge(Tryer(dispatcher, Checker(meshes, device=device)), mesh, has_plan=has_plan)
        summary = Summary(captured.names, judge, FlopCounter(dispatcher), report)
        covered = [
            Coverage(
                rank=dist.get_rank(),
                level=level,
                axes=_axes(mesh),
                has_plan=has_plan,
                ops=summary.add_up(_calls_at(level, captured, dispatcher)),
            )
            for level in levels
        ]
    return Recording(
        run=_describe_run(mesh),
        coverage=tuple(covered),
        gaps=tuple(Gap(place=place, fact=fact, rank=dist.get_rank()) for place, fact in gaps),
    )


def _stand_in_maker(
    model: nn.Module, plan: Plan | None, mesh: DeviceMesh, device: torch.device
) -> Callable[[torch.Tensor], torch.Tensor]:
    if isinstance(plan, Mapping):
        layout = read_layout(model, plan, mesh)
        return lambda tensor: layout.lay_out(tensor, device)
    return lambda tensor: empty_like(tensor, device)


def _calls_at(level: Level, captured: Captured, dispatcher: Dispatcher) -> Capture:
    if level is not Level.EXPORTED:
        return take_apart(captured.called, level, dispatcher)
    calls = {call: Use(forward=use.forward) for call, use in captured.written.items()}
    for call, use in captured.called.items():
        if use.backward:
            calls.setdefault(call, Use()).add(Use(backward=use.backward))
    return calls


def _axes(mesh: DeviceMesh) -> tuple[Axis, ...]:
    names = axis_names(mesh)
    return tuple(Axis(name=name, size=size) for name, size in zip(names, mesh.shape, strict=True))


def _describe_run(mesh: DeviceMesh) -> RunInfo:
    return RunInfo(
        torch_version=str(torch.__version__),
        shardscope_version=__version__,
        world_size=dist.get_world_size(),
        ranks=(RankSpan(dist.get_rank()),),
        axes=_axes(mesh),
        is_simulated=True,
    )
