"""`parallelize`: from a single-device program, a mesh and a plan to a program for each rank."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar, final

from torch import Tensor, nn
from torch.export import ExportedProgram

from shardscope._torch.modules import is_compile_wrapper, unwrap
from shardscope._torch.private import explain_moved_names
from shardscope.errors import ParallelError
from shardscope.parallel.equivalence.runs import copy_model
from shardscope.parallel.ir.graph import Role, ShardingGraph, Value, explained
from shardscope.parallel.ir.mesh import Mesh, read_mesh
from shardscope.parallel.ir.shard_spec import MeshCoordinate
from shardscope.parallel.ir.symbolic_sizes import find_sharded_symbols
from shardscope.parallel.passes.capture import Capture, WithLoss, export_model, export_with_loss
from shardscope.parallel.passes.constraints import BoundaryConstraints, check_heads, find_boundaries
from shardscope.parallel.passes.from_export import make_functional, read_program
from shardscope.parallel.passes.propagate import AxisConstraints, Fallback, propagate_axis
from shardscope.parallel.passes.schedule_check import check_order
from shardscope.parallel.plan.plan import Plan
from shardscope.parallel.plan.program_index import index_program
from shardscope.parallel.plan.resolve import PlacementConstraint, ResolvedPlan, resolve
from shardscope.parallel.program import ParallelProgram
from shardscope.plan.placements import Placement, Replicate

_Key = TypeVar("_Key")
_export_lock = threading.RLock()
_NO_CONSTRAINTS = AxisConstraints(
    inputs={}, module_inputs={}, module_outputs={}, outputs=lambda _: None
)


@explain_moved_names
def parallelize(
    program: ExportedProgram | nn.Module,
    mesh: Any,
    plan: Any,
    *,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    loss: Callable[..., Tensor] | None = None,
    targets: Sequence[Any] = (),
    inputs: Mapping[str | int, Any] | None = None,
    outputs: Mapping[str | int, Any] | None = None,
    dynamic_shapes: Any = None,
    training: bool = False,
    strict: bool = False,
    verify: bool = True,
) -> ParallelProgram:
    """Partition an exported program, or a model with example inputs, for each rank of a mesh.

    Tensors that the plan does not mention stay replicated. The original is not changed.

    Args:
        program: A `torch.export` program, or a model that is exported on `args` and `kwargs`.
        mesh: A `DeviceMesh`, or axis names and sizes: `"dp=2,tp=4"` or `{"dp": 2, "tp": 4}`.
        plan: A `Plan`, a mapping of module names or patterns to styles, or the path of a TOML file.
        args: Example arguments of the model.
        kwargs: Example keyword arguments of the model.
        loss: A function `loss(output, *targets)`; the program is then ready for training.
        targets: Example targets of the loss.
        inputs: Placements of inputs, by path or position; others are replicated.
        outputs: Placements of outputs, by path or position.
        dynamic_shapes: `dynamic_shapes` of torch.export.
        training: The exported program returns a loss and is to be trained.
        strict: Raise an error if an op cannot run on shards.
        verify: Run all ranks in this process and compare them with the original.

    Examples:
        >>> plan = {"layers.*.up": Colwise(), "layers.*.down": Rowwise()}
        >>> program = parallelize(model, "tp=4", plan, args=(tokens,))
        >>> program.collectives
    """
    axes = read_mesh(mesh)
    full_plan = Plan.of(plan).with_values(inputs=inputs, outputs=outputs)
    if isinstance(program, nn.Module) and is_compile_wrapper(program):
        program = unwrap(program)  # its modules have the names that plans are written for
    examples = _check_arguments(program, args, kwargs or {}, loss, targets, dynamic_shapes)
    # Torch traces one program at a time.
    with _export_lock, explained(f"{type(program).__name__} cannot be parallelized"):
        captured, original = _capture(program, examples, loss, dynamic_shapes)
        is_training = training or loss is not None
        parallel_program = _partition_capture(captured, axes, full_plan, is_training=is_training)
        parallel_program.original = original
        if strict and parallel_program.fallbacks:
            raise _strict_error(parallel_program.fallbacks, axes)
        if verify:
            parallel_program.verify()
    return parallel_program


def partition_by_plan(
    program: ExportedProgram, mesh: Any, plan: Any, *, is_training: bool = False
) -> ParallelProgram:
    """Partition an exported program by a plan; without verification."""
    return _partition_capture(
        Capture(program), read_mesh(mesh), Plan.of(plan), is_training=is_training
    )


def _partition_capture(
    capture: Capture, mesh: Mesh, plan: Plan, *, is_training: bool
) -> ParallelProgram:
    index = index_program(capture.program)
    resolved = resolve(plan, index, mesh.axes)
    # A cache of keys and values is the model's own state: each rank keeps its shard of it, unless
    # the plan names that output.
    cached = [path for i, path in enumerate(index.outputs or ()) if i in capture.cached]
    as_computed: dict[str, PlacementConstraint] = dict.fromkeys(cached, (None,) * len(mesh.axes))
    resolved = replace(resolved, outputs={**as_computed, **resolved.outputs})
    return partition_program(capture.program, mesh, resolved, is_training=is_training)


def partition_program(
    program: ExportedProgram, mesh: Mesh, resolved: ResolvedPlan, *, is_training: bool = False
) -> ParallelProgram:
    """Partition an exported program by a resolved plan, which may be empty."""
    index = index_program(program)
    source = make_functional(program)
    graph = read_program(source)
    names = {value.alias: path for path, value in (index.inputs or {}).items()}
    graph.name_values(names, list(index.outputs or ()))
    names_by_primary = {
        primary: (primary, *tensor.aliases) for primary, tensor in index.tensors.items()
    }
    aliases = {name: names_by_primary[primary] for name, primary in index.primary_names.items()}
    fallbacks = propagate_all_axes(graph, mesh, resolved, aliases=aliases, is_training=is_training)
    parallel_program = ParallelProgram(
        source=source,
        graph=graph,
        mesh=mesh,
        plan=resolved,
        fallbacks=fallbacks,
        is_training=is_training,
    )
    check_order(graph, mesh, gradients=parallel_program.gradients)
    return parallel_program


def propagate_all_axes(
    graph: ShardingGraph,
    mesh: Mesh,
    resolved: ResolvedPlan,
    *,
    aliases: Mapping[str, Sequence[str]] | None = None,
    is_training: bool = False,
) -> list[Fallback]:
    """Propagate placements and insert reshards along each axis of the mesh in turn."""
    boundaries = find_boundaries(graph, resolved, aliases)
    check_heads(graph, boundaries, mesh)
    input_placements = _place_inputs(graph, resolved)
    constrained = [*boundaries.module_outputs.items(), *input_placements.items()]
    constrained += [
        (value, constraint) for (_, value), constraint in boundaries.module_inputs.items()
    ]
    graph.shard_sizes(
        find_sharded_symbols(
            [(value.shape, constraint) for value, constraint in constrained], mesh.sizes
        )
    )
    first_coordinate = MeshCoordinate(mesh.sizes, (0,) * len(mesh.sizes))
    fallbacks = []
    for axis, num_ranks in enumerate(mesh.sizes):
        # Along an axis of one rank everything is replicated.
        is_single_rank = num_ranks == 1
        constraints = (
            _NO_CONSTRAINTS
            if is_single_rank
            else _axis_constraints(graph, resolved, boundaries, input_placements, axis)
        )
        fallbacks += propagate_axis(
            graph,
            axis=axis,
            coordinate=first_coordinate,
            constraints=constraints,
            is_training=is_training,
        )
    return fallbacks


def check_program(program: Any) -> None:
    """Raise ParallelError unless it is an exported program."""
    if isinstance(program, ExportedProgram):
        return
    remedy = "Export it first: torch.export.export(model, example_inputs)."
    if not isinstance(program, nn.Module):
        remedy = "Give what torch.export.export(model, example_inputs) returns."
    raise ParallelError(f"{type(program).__name__} is not an exported program. {remedy}")


@final
@dataclass(frozen=True)
class _ExampleInputs:
    """Example arguments of a model, and of its loss after the output."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    targets: tuple[Any, ...]


def _check_arguments(
    program: Any, args: Any, kwargs: Any, loss: Any, targets: Any, dynamic_shapes: Any
) -> _ExampleInputs:
    examples = _ExampleInputs(_as_tuple(args), dict(kwargs), _as_tuple(targets))
    is_program = isinstance(program, ExportedProgram)
    if is_program and (examples.args or kwargs or loss is not None or dynamic_shapes is not None):
        raise ParallelError(
            "args, kwargs, loss and dynamic_shapes are for a model that is still to be "
            "exported. Give the model, or export it with its loss and pass training=True."
        )
    if examples.targets and loss is None:
        raise ParallelError(
            "targets are what a loss takes after the model's output, and there is no loss. Give "
            "loss=, called as loss(output, *targets)."
        )
    if loss is not None and not callable(loss):
        raise ParallelError(
            f"loss is {type(loss).__name__}, not a function. Give one that is called as "
            "loss(output, *targets) and returns one number."
        )
    if not is_program and not isinstance(program, nn.Module):
        raise ParallelError(
            f"{type(program).__name__} is neither an exported program nor a model. Give what "
            "torch.export.export(model, args) returns, or the model and args."
        )
    if not is_program and not (examples.args or examples.kwargs):
        raise ParallelError(
            f"{type(program).__name__} is a model, and there is nothing to export it with. Give "
            "example inputs: parallelize(model, mesh, plan, args=(x,))."
        )
    return examples


def _as_tuple(values: Any) -> tuple[Any, ...]:
    return tuple(values) if isinstance(values, (tuple, list)) else (values,)


def _capture(
    program: Any, examples: _ExampleInputs, loss: Any, dynamic_shapes: Any
) -> tuple[Capture, Callable[[], nn.Module]]:
    """The exported program, and a function that returns a copy of the model it comes from."""
    if isinstance(program, ExportedProgram):
        return Capture(program), lambda: copy_model(program.module())
    args, kwargs = examples.args, examples.kwargs
    if loss is None:
        return export_model(program, args, kwargs, dynamic_shapes), lambda: copy_model(program)
    targets = examples.targets
    captured = export_with_loss(program, loss, args, kwargs, targets, dynamic_shapes)
    return Capture(captured), lambda: WithLoss(copy_model(program), loss, args, kwargs, targets)


def _place_inputs(
    graph: ShardingGraph, resolved: ResolvedPlan
) -> dict[Value, tuple[Placement, ...]]:
    """The placements of inputs, parameters, buffers and constants that the plan shards."""
    placements = {}
    for value, role in graph.inputs:
        table = resolved.inputs if role.kind == "input" else resolved.tensors
        if role.name in table:
            placements[value] = table[role.name]
    return placements


def _axis_constraints(
    graph: ShardingGraph,
    resolved: ResolvedPlan,
    boundaries: BoundaryConstraints,
    input_placements: Mapping[Value, tuple[Placement, ...]],
    axis: int,
) -> AxisConstraints:
    is_data_axis = any(
        placements[axis] != Replicate()
        for value, placements in input_placements.items()
        if any(source is value and role.kind == "input" for source, role in graph.inputs)
    )

    def constrain_output(role: Role) -> Placement | None:
        if role.kind == "mutation":
            return resolved.tensors.get(role.name, _replicate_all(resolved))[axis]
        if role.kind == "input mutation":
            return resolved.inputs.get(role.name, _replicate_all(resolved))[axis]
        if role.name in resolved.outputs:
            return resolved.outputs[role.name][axis]
        return None if is_data_axis else Replicate()

    return AxisConstraints(
        inputs={value: placements[axis] for value, placements in input_placements.items()},
        module_inputs=_along_axis(boundaries.module_inputs, axis),
        module_outputs=_along_axis(boundaries.module_outputs, axis),
        outputs=constrain_output,
        exited_modules=boundaries.exited_modules,
        is_data_axis=is_data_axis,
    )


def _along_axis(
    module_constraints: Mapping[_Key, PlacementConstraint], axis: int
) -> dict[_Key, Placement]:
    placements = {key: constraint[axis] for key, constraint in module_constraints.items()}
    return {key: placement for key, placement in placements.items() if placement is not None}


def _replicate_all(resolved: ResolvedPlan) -> tuple[Placement, ...]:
    return (Replicate(),) * len(resolved.axes)


def _strict_error(fallbacks: list[Fallback], mesh: Mesh) -> ParallelError:
    first = fallbacks[0]
    axis = list(mesh.axes)[first.axis]
    placements = ", ".join(str(placement) for placement in first.placements)
    more = f", and {len(fallbacks) - 1} more" if len(fallbacks) > 1 else ""
    return ParallelError(
        f"strict: {first.origin.op} ({first.origin.node}, in {first.origin.module or 'the program'}"
        f", {first.origin.line}) cannot run on {placements} along {axis}{more}. Change the plan "
        "so that "
        "its inputs are replicated there, or drop strict=True to have them gathered."
    )
