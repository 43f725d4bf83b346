"""Partitions an exported program by a plan: a graph with placements and reshards for all ranks.

The plan's placements of module inputs and outputs are matched with the values that enter and leave
those modules, and placements are propagated along each mesh axis in turn.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import TypeVar, final

import torch
from torch.export import ExportedProgram

from shardscope.errors import PlanError
from shardscope.parallel.ir.graph import (
    OpNode,
    Origin,
    Role,
    ShardingGraph,
    Value,
    find_sharded_symbols,
    values_in,
)
from shardscope.parallel.ir.mesh import Mesh, read_mesh
from shardscope.parallel.ir.shard_spec import MeshCoordinate
from shardscope.parallel.passes import (
    AxisConstraints,
    Capture,
    Fallback,
    check_order,
    make_functional,
    propagate_axis,
    read_program,
)
from shardscope.parallel.plan import PlacementConstraint, ResolvedPlan, index_program, resolve
from shardscope.parallel.plan.resolve import InputConstraints
from shardscope.parallel.program import ParallelProgram
from shardscope.plan import Plan
from shardscope.plan.placements import Placement, Replicate, Shard

_Key = TypeVar("_Key")
_NO_CONSTRAINTS = AxisConstraints(
    inputs={}, module_inputs={}, module_outputs={}, outputs=lambda _: None
)


def partition_by_plan(
    program: ExportedProgram, mesh: object, plan: object, *, is_training: bool = False
) -> ParallelProgram:
    """Partition an exported program by a plan; without verification."""
    return partition_capture(
        Capture(program), read_mesh(mesh), Plan.of(plan), is_training=is_training
    )


def partition_capture(
    capture: Capture, mesh: Mesh, plan: Plan, *, is_training: bool
) -> ParallelProgram:
    """Partition a captured program by a plan; a cache of keys and values stays sharded."""
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


@final
@dataclass(frozen=True)
class BoundaryConstraints:
    """Placements that the plan demands of values, one per axis; None: no constraint along it."""

    module_inputs: dict[tuple[str, Value], PlacementConstraint] = field(
        default_factory=dict
    )  # by module call
    module_outputs: dict[Value, PlacementConstraint] = field(default_factory=dict)
    exited_modules: dict[Value, str] = field(
        default_factory=dict
    )  # by value, the module whose output it is


@final
@dataclass
class _ModuleCall:
    """One call of a module: the values that it reads from outside, and those used outside."""

    module: str
    module_inputs: dict[Value, None] = field(default_factory=dict)
    module_outputs: dict[Value, None] = field(default_factory=dict)


def find_boundaries(
    graph: ShardingGraph, resolved: ResolvedPlan, aliases: Mapping[str, Sequence[str]] | None = None
) -> BoundaryConstraints:
    """The values to which the plan's placements of module inputs and outputs apply.

    `aliases` maps a tensor's name to its other names: a module's own parameters are not inputs of
    it under any name.
    """
    constrained_modules = {*resolved.module_inputs, *resolved.module_outputs}
    boundaries = BoundaryConstraints()
    for key, call in _find_calls(graph, constrained_modules, aliases or {}).items():
        module_constraints = resolved.module_inputs.get(call.module)
        if module_constraints is not None:
            for value, constraint in _match_inputs(call, module_constraints):
                boundaries.module_inputs[key, value] = _from_front(constraint, value)
        _match_outputs(call, resolved.module_outputs.get(call.module, ()), boundaries)
    return boundaries


def _find_calls(
    graph: ShardingGraph, modules: set[str], aliases: Mapping[str, Sequence[str]]
) -> dict[str, _ModuleCall]:
    state = {
        value: (role.name, *aliases.get(role.name, ()))
        for value, role in graph.inputs
        if role.kind != "input"
    }
    origins: dict[Value, Origin] = {}
    calls: dict[str, _ModuleCall] = {}
    for op_node in graph.op_nodes:
        assert isinstance(op_node, OpNode)
        for value in values_in(op_node.arguments):
            _add_use(value, op_node.origin, origins, calls, modules, state)
        origins.update(dict.fromkeys(op_node.outputs, op_node.origin))
    for item, _ in graph.outputs:
        for value in values_in(item):
            _add_use(value, Origin(), origins, calls, modules, state)
    return calls


def _add_use(
    value: Value,
    user: Origin,
    origins: Mapping[Value, Origin],
    calls: dict[str, _ModuleCall],
    modules: set[str],
    state: Mapping[Value, Sequence[str]],
) -> None:
    if not value.is_tensor:
        return
    producer = origins.get(value, Origin())
    for key, module in _only_in(user, producer, modules):
        if any(name.startswith(f"{module}.") or not module for name in state.get(value, ())):
            continue
        calls.setdefault(key, _ModuleCall(module)).module_inputs[value] = None
    for key, module in _only_in(producer, user, modules):
        calls.setdefault(key, _ModuleCall(module)).module_outputs[value] = None


def _only_in(origin: Origin, outside: Origin, modules: set[str]) -> Iterable[tuple[str, str]]:
    return [call for call in origin.calls if call[1] in modules and call not in outside.calls]


def _match_inputs(
    call: _ModuleCall, module_constraints: InputConstraints
) -> Iterable[tuple[Value, PlacementConstraint]]:
    """Positional inputs in the order in which the module first uses them."""
    values = list(call.module_inputs)
    if module_constraints.keyword:
        raise PlanError(
            f"the plan places the keyword argument {next(iter(module_constraints.keyword))!r} of "
            f"{call.module}, "
            "but an exported program does not keep the names of its modules' arguments. Give the "
            "placements by position."
        )
    num_wanted = max(
        (i + 1 for i, constraint in enumerate(module_constraints.positional) if constraint),
        default=0,
    )
    if num_wanted > len(values):
        raise PlanError(
            f"the plan places input {num_wanted - 1} of {call.module}, but only {len(values)} "
            "tensors enter it in this program. Leave out the placements of the others."
        )
    return [
        (v, constraint)
        for v, constraint in zip(values, module_constraints.positional, strict=False)
        if constraint
    ]


def _match_outputs(
    call: _ModuleCall,
    module_constraints: tuple[PlacementConstraint | None, ...],
    boundaries: BoundaryConstraints,
) -> None:
    values = list(call.module_outputs)
    if not values:
        return  # its outputs are unused
    if len(module_constraints) > len(values) and any(module_constraints[len(values) :]):
        raise PlanError(
            f"the plan places output {len(module_constraints) - 1} of {call.module}, but only "
            f"{len(values)} "
            "tensors leave it in this program. Leave out the placements of the others."
        )
    for value, constraint in zip(values, module_constraints, strict=False):
        if constraint:
            boundaries.module_outputs[value] = _from_front(constraint, value)
            boundaries.exited_modules[value] = call.module


def _from_front(constraint: PlacementConstraint, value: Value) -> PlacementConstraint:
    return tuple(_count_from_front(placement, value) for placement in constraint)


def _count_from_front(placement: Placement | None, value: Value) -> Placement | None:
    if not isinstance(placement, Shard):
        return placement
    num_dims = len(value.shape)
    if not -num_dims <= placement.dim < num_dims:
        raise PlanError(
            f"the plan shards dim {placement.dim} of {value.name}, which has {num_dims} dims. "
            "Name a dim that it has."
        )
    return placement.at(placement.dim % num_dims)


_VIEWS = (
    torch.ops.aten.view.default,
    torch.ops.aten.reshape.default,
    torch.ops.aten.unflatten.int,
)


def check_heads(graph: ShardingGraph, boundaries: BoundaryConstraints, mesh: Mesh) -> None:
    """Raise PlanError if the plan shards a module's output so that attention heads are split."""
    users: dict[Value, list[OpNode]] = defaultdict(list)
    for op_node in graph.op_nodes:
        if isinstance(op_node, OpNode) and op_node.op in _VIEWS:
            users[op_node.inputs[0]].append(op_node)
    for value, constraint in boundaries.module_outputs.items():
        for op_node in users[value]:
            _check_view(
                value, constraint, op_node, mesh, boundaries.exited_modules.get(value) or value.name
            )


def _check_view(
    value: Value, constraint: PlacementConstraint, op_node: OpNode, mesh: Mesh, module: str
) -> None:
    last = len(value.shape) - 1
    sharded_axes = [
        (axis, size)
        for (axis, size), placement in zip(mesh.axes.items(), constraint, strict=True)
        if isinstance(placement, Shard) and placement.dim == last and placement.is_plain
    ]
    num_heads = _num_heads(value, op_node.outputs[0])
    if (
        not sharded_axes
        or num_heads is None
        or num_heads % prod(size for _, size in sharded_axes) == 0
    ):
        return
    axes = " × ".join(f"{axis}={size}" for axis, size in sharded_axes)
    line = f" ({op_node.origin.line})" if op_node.origin.line else ""
    location = op_node.origin.module or "the program"
    size = value.shape[-1] // num_heads
    raise PlanError(
        f"the plan shards the output of {module} over {axes}, but {location} views its "
        f"{value.shape[-1]} features as {num_heads} heads of {size}{line}, and {num_heads} is not "
        f"divisible. Use a mesh whose size divides {num_heads}, or leave {module} out of the plan."
    )


def _num_heads(source: Value, view: Value) -> int | None:
    """The first of the sizes into which a view splits the last dim; None if it does not."""
    full_size, size = source.shape[-1], 1
    for part in reversed(view.shape):
        size = size * part
        if size == full_size:
            return part if part != full_size and isinstance(part, int) else None
    return None
