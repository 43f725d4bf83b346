"""`coverage(model, …)`: which of a model's ops can run sharded, what each costs, and which ops
block sharding first.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from shardscope._torch.cuda.runtime import is_simulated
from shardscope._torch.dtensor import preserved_propagator
from shardscope._torch.fake import NO_DATA
from shardscope._torch.fsdp import meshes_of
from shardscope._torch.mesh import describe_axes, group_backend
from shardscope._torch.modules import unwrap
from shardscope._torch.private import explain_moved_names
from shardscope.attribution.module_names import ModuleNames
from shardscope.attribution.program_records import describe_run, find_torch_gaps, read_identity
from shardscope.attribution.tensors import empty_like
from shardscope.errors import CoverageError
from shardscope.record import (
    Coverage,
    Gap,
    Level,
    OpCoverage,
    Recording,
)
from shardscope.shard.coverage.dispatch import Dispatcher, describe
from shardscope.shard.coverage.levels import FlopCounter, Summary, decompose
from shardscope.shard.coverage.model_run import (
    CapturedOps,
    Plan,
    Program,
    Report,
    parallelize_copy,
    read_layout,
    run_model,
)
from shardscope.shard.coverage.numeric_check import Checker
from shardscope.shard.coverage.op_calls import Capture, Use
from shardscope.shard.coverage.small_mesh import small_meshes
from shardscope.shard.coverage.verdicts import Judge, ShardingTester
from shardscope.world import current_world, simulate

_DEFAULT_MESH = {"tp": 2}


@contextmanager
def coverage_world(
    model: nn.Module, mesh: Mapping[str, int] | DeviceMesh | None
) -> Iterator[DeviceMesh]:
    """The mesh to test on: the current world's, or that of a simulated world made for it."""
    if isinstance(mesh, DeviceMesh):
        yield mesh
    elif dist.is_initialized():
        yield _mesh_of_world(model, mesh)
    else:
        axes = _DEFAULT_MESH if mesh is None else mesh
        with simulate(axes, device=_device_type(model)) as world:
            yield world.mesh


def _device_type(model: nn.Module) -> str:
    """The device type of the model: kernels differ by device."""
    types = {tensor.device.type for tensor in model.parameters()} - {"meta", "cpu"}
    return types.pop() if len(types) == 1 else "cpu"


def _mesh_of_world(model: nn.Module, mesh: Mapping[str, int] | None) -> DeviceMesh:
    if group_backend() != "fake":
        raise CoverageError(
            f"coverage() was called in a process group of {dist.get_world_size()} real ranks "
            f"({dist.get_backend()}). Call it in one process by itself, or within simulate()."
        )
    world = current_world()
    device_mesh = next(meshes_of(model), None) or (None if world is None else world.mesh)
    if device_mesh is None:
        raise CoverageError(
            "coverage() was called in a fake process group, and the model is on no mesh. Give "
            "it one: coverage(model, …, mesh=init_device_mesh(…))."
        )
    if mesh is not None and world is not None and dict(mesh) != world.axes:
        raise CoverageError(
            f"coverage() got mesh={dict(mesh)!r} within a world whose mesh is {world.axes!r}. "
            "Leave it out there."
        )
    return device_mesh


_LEVELS = tuple(Level)
# DTensor's caches, the process group and nn.Module's call are shared by all threads.
_lock = threading.RLock()


@explain_moved_names
def coverage(
    model: nn.Module,
    *args: Any,
    mesh: Mapping[str, int] | DeviceMesh | None = None,
    plan: Plan | None = None,
    loss: Callable[[Any], Any] | None = None,
    levels: Sequence[Level | str] = _LEVELS,
    **kwargs: Any,
) -> Recording:
    """Find out which ops of a model and its backward can run sharded.

    Each distinct call of an op is dispatched on DTensors in a simulated world and computed on small
    samples. Placements are those of a model that is already sharded, those of `plan`, or each dim
    of each input in turn. The model is not changed.

    Args:
        model: The model.
        *args: Its arguments.
        mesh: A mesh to simulate, such as `{"tp": 2}`, or a device mesh.
        plan: Placements by patterns of module or parameter names, or a function `(model, mesh)`
            that shards a copy.
        loss: A function of the output from which backward starts; by default every output that
            requires grad.
        levels: Levels of decomposition to check: exported, core_aten, inductor.
        **kwargs: Keyword arguments of the model.

    Examples:
        >>> show(coverage(model, tokens, mesh={"tp": 4}, plan=parallelize))
    """
    if not isinstance(model, nn.Module):
        raise CoverageError(
            f"coverage() got {type(model).__name__} instead of a module. Give it a model, then "
            "what to call it with: coverage(model, tokens)."
        )
    if any(is_lazy(parameter) for parameter in model.parameters()):
        raise CoverageError(
            "coverage() got a model with parameters that have no shape yet. Call it once with "
            "such inputs to initialize them."
        )

    if any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()):
        raise CoverageError(
            "coverage() got a TorchScript model, whose ops and tensors are hidden. Give it the "
            "original model."
        )

    def forward(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        output = model(*args, **kwargs)
        return output if loss is None else _find_loss(loss, output)

    task = _Task(unwrap(model), args, kwargs, forward, plan=plan)
    return _cover(task, mesh, _read_levels(levels))


def _find_loss(loss: Callable[[Any], Any], output: Any) -> Any:
    try:
        return loss(output)
    except NO_DATA:
        raise
    except Exception as error:
        raise CoverageError(
            f"loss raised {describe(error)} for the model's output. Run the loss on that output "
            "first, without shardscope."
        ) from error


def cover_step(
    model: nn.Module,
    step: Callable[[nn.Module, Any], Any],
    batch: Any,
    *,
    mesh: DeviceMesh,
    levels: Sequence[Level | str] = _LEVELS,
    report: Callable[[str], None] = lambda _: None,
) -> Recording:
    """`coverage` for a step that calls the model and its backward itself.

    `report` is called with a line of progress from time to time.
    """
    task = _Task(model, (batch,), {}, step, has_backward=False, report_progress=report)
    return _cover(task, mesh, _read_levels(levels))


def cover_calls(calls: Sequence[Capture]) -> tuple[OpCoverage, ...]:
    """`coverage` for calls captured before, without a plan, on the current world's mesh."""
    merged_calls: Capture = {}
    for captured in calls:
        for call, use in captured.items():
            merged_calls.setdefault(call, Use()).add(use)
    with _lock, preserved_propagator(), coverage_world(nn.Module(), None) as mesh:
        dispatcher = Dispatcher(device=torch.device(mesh.device_type), is_implicit=False)
        with _judging(mesh, dispatcher, ModuleNames(None), lambda *_: None) as summary:
            return summary.summarize(merged_calls)


@dataclass(frozen=True)
class _Task:
    """What to run, `run(model, *args, **kwargs)`, and the plan that places the model's tensors."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    run: Callable[..., Any]
    plan: Plan | None = None
    has_backward: bool = True
    report_progress: Callable[[str], None] = lambda _: None


def _read_levels(levels: Sequence[Level | str]) -> list[Level]:
    names = [levels] if isinstance(levels, str) else levels
    try:
        known_levels = [level for level in Level if level in {Level(name) for name in names}]
    except ValueError:
        known_levels = []
    if not known_levels:
        raise CoverageError(
            f"coverage() got levels={levels!r:.80}. The levels are {', '.join(Level)}."
        )
    return known_levels


def _cover(
    task: _Task, mesh: Mapping[str, int] | DeviceMesh | None, levels: list[Level]
) -> Recording:
    with _lock, ExitStack() as stack:
        stack.enter_context(preserved_propagator())
        own_mesh = stack.enter_context(coverage_world(task.model, mesh))
        gaps: dict[tuple[str, str], None] = {}
        if own_mesh.size() == 1:
            raise CoverageError(
                "coverage() got a mesh of one rank, on which nothing is sharded. Give it a "
                'mesh of two or more ranks, such as mesh={"tp": 2}.'
            )
        covered = _judge(task, own_mesh, levels, lambda *gap: gaps.setdefault(gap))
        rank = dist.get_rank()
        return Recording(
            run=describe_run(*read_identity(), describe_axes(own_mesh), instrument="coverage"),
            coverage=tuple(covered),
            gaps=(
                *find_torch_gaps(rank),
                *(Gap(place=place, fact=fact, rank=rank) for place, fact in gaps),
            ),
        )


def _judge(task: _Task, mesh: DeviceMesh, levels: list[Level], report: Report) -> list[Coverage]:
    device = torch.device(mesh.device_type)
    plan, model = task.plan, task.model
    if callable(plan):
        model = parallelize_copy(model, plan, mesh)
    elif plan is not None and not isinstance(plan, Mapping):
        raise CoverageError(
            f"coverage() got {type(plan).__name__} for a plan. Give placements by patterns of "
            "parameter names, or a function of model and mesh that shards the model."
        )
    has_plan = plan is not None or any(
        isinstance(parameter, DTensor) for parameter in model.parameters()
    )
    dispatcher = Dispatcher(device=device, is_implicit=isinstance(plan, Mapping))
    program = Program(
        model,
        task.args,
        task.kwargs,
        partial(task.run, model),
        _substitute_maker(model, plan, mesh, device),
        has_backward=task.has_backward,
    )
    task.report_progress("running a step")
    with dispatcher.implicit():
        captured = run_model(program, report)
    judging = _judging(
        mesh,
        dispatcher,
        captured.names,
        report,
        has_plan=has_plan,
        handlers=captured.handlers,
    )
    with judging as summary:
        return [
            Coverage(
                rank=dist.get_rank(),
                level=level,
                axes=describe_axes(mesh),
                has_plan=has_plan,
                ops=summary.summarize(
                    _calls_at(level, captured, dispatcher, report),
                    report_progress=partial(_report_op, task.report_progress, level),
                ),
            )
            for level in levels
        ]


def _report_op(
    report_progress: Callable[[str], None], level: Level, op: str, number: int, total: int
) -> None:
    report_progress(f"testing {op} ({number:,} of {total:,}, {level})")


@contextmanager
def _judging(
    mesh: DeviceMesh,
    dispatcher: Dispatcher,
    names: ModuleNames,
    report: Report,
    *,
    has_plan: bool = False,
    handlers: Mapping[Any, Any] = MappingProxyType({}),
) -> Iterator[Summary]:
    """A summary that dispatches op calls on `mesh`, computes them, and judges them.

    They are computed on the mesh's device, or on the CPU if that is simulated.
    """
    stands_for_cuda = is_simulated()
    device = torch.device("cpu" if stands_for_cuda else mesh.device_type)
    with small_meshes(mesh, device.type) as meshes, dispatcher.watching(handlers):
        checker = Checker(meshes, device=device, stands_for_cuda=stands_for_cuda)
        judge = Judge(ShardingTester(dispatcher, checker), mesh, has_plan=has_plan)
        yield Summary(names, judge, FlopCounter(dispatcher), report)


def _substitute_maker(
    model: nn.Module, plan: Plan | None, mesh: DeviceMesh, device: torch.device
) -> Callable[[torch.Tensor], torch.Tensor]:
    if isinstance(plan, Mapping):
        layout = read_layout(model, plan, mesh)
        return lambda tensor: layout.lay_out(tensor, device)
    return lambda tensor: empty_like(tensor, device)


def _calls_at(
    level: Level, captured: CapturedOps, dispatcher: Dispatcher, report: Report
) -> Capture:
    if level is not Level.EXPORTED:
        return decompose(captured.called, level, dispatcher, report)
    calls = {call: Use(forward=use.forward) for call, use in captured.written.items()}
    for call, use in captured.called.items():
        if use.backward:
            calls.setdefault(call, Use()).add(Use(backward=use.backward))
    return calls
