"""The collective schedules of the ranks, and the check that they match.

`trace_collectives` lists a rank's collectives in order without lowering its program. Only reshards
and gradient reductions issue collectives. They are lowered as for the rank's program, but on meta
tensors, by an emitter that records the collectives instead of writing them. `check_order` raises if
ranks would issue other collectives, or in another order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import cast, final

import torch
from torch import Tensor, fx

from shardscope._torch.dispatch import is_overload
from shardscope.errors import ParallelError
from shardscope.parallel.ir.graph import (
    OpNode,
    Reshard,
    Role,
    ShardingGraph,
    Value,
    map_nest,
    values_in,
)
from shardscope.parallel.ir.mesh import Mesh
from shardscope.parallel.ir.shard_spec import MeshCoordinate, ShardSpec
from shardscope.parallel.passes.collectives import FunctionalEmitter
from shardscope.parallel.passes.cost_model import Hints, size_hint
from shardscope.parallel.passes.grad_reduction import (
    Gradients,
    GradReductions,
    find_grad_reductions,
)
from shardscope.parallel.passes.lower import lower_rank
from shardscope.parallel.passes.reshard import CollectiveEmitter, lower_reshard
from shardscope.parallel.passes.strategies import SYM_SIZE
from shardscope.parallel.sharding_rules.context import GraphBuilder
from shardscope.parallel.sharding_rules.registry import find_lowering
from shardscope.plan.placements import Size
from shardscope.record import CollectiveKind, Phase


@final
@dataclass(eq=False)
class ScheduledCollective:
    """One collective: the tensor that the rank contributes, and the nodes that need it.

    Forward, `op_nodes` is the reshard alone. Backward, it is the reshard that is differentiated,
    or, for a gradient reduction, the sharded ops that read the value.
    """

    kind: CollectiveKind
    axis: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    reduction: str
    phase: Phase
    value: Value
    op_nodes: list[OpNode | Reshard]
    is_issued: bool = True
    is_grad_reduction: bool = False  # sharded ops read the replicated value

    @property
    def size_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def trace_collectives(
    graph: ShardingGraph,
    coordinate: MeshCoordinate,
    *,
    gradients: Gradients | None = None,
    grad_reductions: GradReductions | None = None,
) -> list[ScheduledCollective]:
    """The collectives of the rank at this mesh coordinate; with `gradients`, also backward.

    `grad_reductions` are the graph's, so that callers find them once for all ranks.
    """
    return _ScheduleTracer(
        graph, coordinate, gradients, grad_reductions or find_grad_reductions(graph)
    ).trace_collectives()


@final
class _ScheduleTracer:
    """Lowers the reshards and gradient reductions of one rank on meta tensors."""

    def __init__(
        self,
        graph: ShardingGraph,
        coordinate: MeshCoordinate,
        gradients: Gradients | None,
        grad_reductions: GradReductions,
    ) -> None:
        self._graph = graph
        self._coordinate = coordinate
        self._gradients = gradients
        self._grad_reductions = grad_reductions
        self._builder = _ScheduleBuilder(graph.sizes.hints)
        self._emitter = _RecordingEmitter(coordinate, self._builder)
        self._grad_reduced: dict[tuple[Value, tuple[int, ...]], list[ScheduledCollective]] = {}

    def trace_collectives(self) -> list[ScheduledCollective]:
        for op_node in self._graph.op_nodes:
            if isinstance(op_node, Reshard):
                self._allreduce_grad(op_node, 0)
                self._lower_reshard(op_node)
            elif self._gradients is not None and op_node.op is not SYM_SIZE:
                for position in range(len(op_node.inputs)):
                    self._allreduce_grad(op_node, position)
        # Autograd visits nodes in the reverse of the order in which they were created.
        backward = [
            collective for collective in reversed(self._emitter.backward) if collective.is_issued
        ]
        return [*self._emitter.forward, *(backward if self._gradients else ())]

    def _lower_reshard(self, reshard: Reshard) -> None:
        self._emitter.set_source(
            reshard.value, reshard, needs_grad=self._passes_gradient(reshard, 0)
        )
        has_partial_grad = self._grad_reductions.has_partial_grad(reshard.output, reshard.axis)
        # Their nodes are meta tensors here, and the lowering only passes nodes on.
        value = cast(fx.Node, self._meta_tensor(reshard.value))
        lower_reshard(
            reshard,
            value,
            coordinate=self._coordinate,
            builder=cast(GraphBuilder, self._builder),
            emitter=cast(CollectiveEmitter, self._emitter),
            has_partial_grad=has_partial_grad,
        )

    def _allreduce_grad(self, op_node: OpNode | Reshard, position: int) -> None:
        value, axes = (
            op_node.inputs[position],
            self._grad_reductions.axes_to_reduce(op_node, position),
        )
        if not axes or self._gradients is None:
            return
        needs_grad = self._passes_gradient(op_node, position)
        if (value, axes) not in self._grad_reduced:
            num_before = len(self._emitter.backward)
            self._emitter.set_source(value, op_node, needs_grad=False)
            for axis in axes:
                self._emitter.allreduce_grad(self._meta_tensor(value), axis=axis)
            self._grad_reduced[value, axes] = self._emitter.backward[num_before:]
        for collective in self._grad_reduced[value, axes]:
            collective.is_issued |= needs_grad
            collective.is_grad_reduction = True
            if needs_grad:
                collective.op_nodes.append(op_node)

    def _passes_gradient(self, op_node: OpNode | Reshard, position: int) -> bool:
        return self._gradients is not None and self._gradients.passes(op_node, position)

    def _meta_tensor(self, value: Value) -> Tensor:
        local = [self._builder.size(size) for size in value.spec.local_shape(self._coordinate)]
        return torch.empty(local, dtype=value.dtype, device="meta")


@final
class _ScheduleBuilder:
    """A GraphBuilder that runs each op at once on meta tensors."""

    def __init__(self, hints: Hints) -> None:
        self._hints = hints

    def write(self, op: Callable[..., object], /, *args: object, **kwargs: object) -> object:
        return op(*args, **kwargs)

    def item(self, value: Sequence[object], index: int) -> object:
        return value[index]

    def size(self, value: Size) -> int:
        return size_hint(value, self._hints)


@final
@dataclass
class _RecordingEmitter:
    """A CollectiveEmitter that records collectives, and those of their gradients."""

    coordinate: MeshCoordinate
    builder: _ScheduleBuilder
    forward: list[ScheduledCollective] = field(default_factory=list)
    backward: list[ScheduledCollective] = field(
        default_factory=list
    )  # in the order of the forward pass

    def set_source(self, value: Value, op_node: OpNode | Reshard, *, needs_grad: bool) -> None:
        """Record what follows as issued for this value and node; `needs_grad`: backward too."""
        self._value, self._op_node, self._needs_grad = value, op_node, needs_grad

    def all_reduce(self, value: Tensor, *, axis: int, reduction: str) -> Tensor:
        self._record_forward(CollectiveKind.ALL_REDUCE, value, axis, reduction)
        return value

    def all_gather(self, value: Tensor, *, axis: int, has_partial_grad: bool) -> Tensor:
        self._record_forward(CollectiveKind.ALL_GATHER, value, axis)
        gathered = value.new_empty([value.shape[0] * self._num_ranks(axis), *value.shape[1:]])
        if has_partial_grad:
            self._record_backward(CollectiveKind.REDUCE_SCATTER, gathered, axis, "sum")
        return gathered

    def reduce_scatter(self, value: Tensor, *, axis: int) -> Tensor:
        self._record_forward(CollectiveKind.REDUCE_SCATTER, value, axis, "sum")
        shard = value.new_empty([value.shape[0] // self._num_ranks(axis), *value.shape[1:]])
        self._record_backward(CollectiveKind.ALL_GATHER, shard, axis)
        return shard

    def all_to_all(self, value: Tensor, *, axis: int, length: Size) -> Tensor:
        self._record_forward(CollectiveKind.ALL_TO_ALL, value, axis)
        self._record_backward(CollectiveKind.ALL_TO_ALL, value, axis)
        return value

    def shard_slice(
        self, value: Tensor, *, axis: int, dim: int, start: Size, size: Size, is_even: bool
    ) -> Tensor:
        shape = list(value.shape)
        shape[dim] = self.builder.size(size)
        shard = value.new_empty(shape)
        if is_even:
            self._record_backward(CollectiveKind.ALL_GATHER, shard.movedim(dim, 0), axis)
        else:
            self.allreduce_grad(value, axis=axis)
        return shard

    def allreduce_grad(self, value: Tensor, *, axis: int) -> Tensor:
        self._record_backward(CollectiveKind.ALL_REDUCE, value, axis, "sum")
        return value

    def _num_ranks(self, axis: int) -> int:
        return self.coordinate.sizes[axis]

    def _record_forward(
        self, kind: CollectiveKind, value: Tensor, axis: int, reduction: str = ""
    ) -> None:
        collective = self._make_collective(kind, value, axis, reduction, Phase.FORWARD)
        collective.op_nodes.append(self._op_node)
        self.forward.append(collective)

    def _record_backward(
        self, kind: CollectiveKind, value: Tensor, axis: int, reduction: str = ""
    ) -> None:
        collective = self._make_collective(kind, value, axis, reduction, Phase.BACKWARD)
        collective.is_issued = self._needs_grad
        if self._needs_grad:
            collective.op_nodes.append(self._op_node)
        self.backward.append(collective)

    def _make_collective(
        self, kind: CollectiveKind, value: Tensor, axis: int, reduction: str, phase: Phase
    ) -> ScheduledCollective:
        shape = tuple(value.shape)
        return ScheduledCollective(
            kind, axis, shape, value.dtype, reduction, phase, self._value, []
        )


_aten = torch.ops.aten
# Ops that read only a tensor's shape or dtype: no gradient passes through them.
_SHAPE_ONLY_OPS = (
    *(_aten.new_zeros.default, _aten.new_ones.default, _aten.new_full.default),
    *(_aten.zeros_like.default, _aten.ones_like.default, _aten.full_like.default),
    *(_aten.new_empty.default, _aten.empty_like.default),
)


def check_dependence(
    graph: ShardingGraph, mesh: Mesh, gradients: Gradients, coordinates: list[MeshCoordinate]
) -> None:
    """Raise ParallelError if an op's results depend on other arguments on some rank.

    Such ranks would compute other gradients, and issue other collectives, in the backward pass.
    Raises for the first op node, comparing the ranks at these mesh coordinates.
    """
    for op_node in _distinct_op_nodes(graph):
        needed = {
            position
            for position in range(len(op_node.inputs))
            if gradients.passes(op_node, position)
        }
        if not needed:
            continue
        used_by_rank = [
            (coordinate, needed & _find_used(op_node, graph, mesh, coordinate))
            for coordinate in coordinates
        ]
        for coordinate, used in used_by_rank[1:]:
            if used != used_by_rank[0][1]:
                raise _dependence_error(
                    op_node, mesh, (used_by_rank[0][0], coordinate), used ^ used_by_rank[0][1]
                )


def _distinct_op_nodes(graph: ShardingGraph) -> Iterator[OpNode]:
    """The op nodes that a lowering rewrites, without those whose op and arguments are equal."""
    known: set[str] = set()
    for op_node in graph.op_nodes:
        if isinstance(op_node, OpNode) and _is_lowered(op_node) and not _has_open_sizes(op_node):
            key = f"{op_node.op} {map_nest(op_node.arguments, _describe_argument)}"
            if key not in known:
                known.add(key)
                yield op_node


def _is_lowered(op_node: OpNode) -> bool:
    is_replicated = all(value.spec.is_replicated for value in (*op_node.inputs, *op_node.outputs))
    return not is_replicated and is_overload(op_node.op) and find_lowering(op_node.op) is not None


def _has_open_sizes(op_node: OpNode) -> bool:
    values = [*values_in(op_node.arguments), *op_node.outputs]
    sizes = [size for value in values for size in (*value.shape, value.scalar)]
    return any(not isinstance(size, (int, float, type(None))) for size in sizes)


def _describe_argument(item: object) -> object:
    if isinstance(item, Value):
        return (item.spec, item.dtype) if item.is_tensor else item.scalar
    return item


def _find_used(
    op_node: OpNode, graph: ShardingGraph, mesh: Mesh, coordinate: MeshCoordinate
) -> set[int]:
    """The positions of the inputs that a rank's results depend on."""
    inputs = list(dict.fromkeys(values_in(op_node.arguments)))
    op_graph = ShardingGraph(
        inputs=[(value, Role("input", value.name)) for value in inputs],
        op_nodes=[op_node],
        outputs=[(value, Role("output", value.name)) for value in op_node.outputs],
        sizes=graph.sizes,
    )
    rank = lower_rank(
        op_graph, coordinate, lambda builder: FunctionalEmitter(builder, mesh, coordinate)
    )
    (output,) = rank.graph.find_nodes(op="output")
    reached = _ancestors(output)
    return {
        position for position, value in enumerate(op_node.inputs) if rank.nodes[value] in reached
    }


def _ancestors(node: fx.Node) -> set[fx.Node]:
    ancestors: set[fx.Node] = set()
    pending = [node]
    while pending:
        for input_node in pending.pop().all_input_nodes:
            if input_node not in ancestors and input_node.target not in _SHAPE_ONLY_OPS:
                ancestors.add(input_node)
                pending.append(input_node)
    return ancestors


def _dependence_error(
    op_node: OpNode,
    mesh: Mesh,
    coordinates: tuple[MeshCoordinate, MeshCoordinate],
    differing: set[int],
) -> ParallelError:
    first_rank, second_rank = (mesh.rank_at(coordinate) for coordinate in coordinates)
    origin = op_node.origin
    value = op_node.inputs[min(differing)].name
    location = f"{origin.module or 'the program'}{', ' if origin.line else ''}{origin.line}"
    return ParallelError(
        f"ranks {first_rank} and {second_rank} would issue different collectives in the backward "
        "pass: of "
        f"{origin.op} ({origin.node}, in {location}), only one of them uses {value}. This is a bug "
        "in shardscope; please report the program."
    )


_MAX_TRACED_RANKS = 16  # up to so many ranks, all are traced


def check_order(graph: ShardingGraph, mesh: Mesh, *, gradients: Gradients | None = None) -> None:
    """Raise ParallelError if the collective schedules of ranks do not match.

    Of many ranks, one is traced for all whose shards have the same shapes: their programs differ
    only in where their shards begin.
    """
    groups: list[tuple[int, ...]] = [(mesh.rank_at(coordinate),) for coordinate in mesh.coordinates]
    if mesh.num_ranks > _MAX_TRACED_RANKS:
        groups = group_ranks_by_shapes(graph, mesh)
    grad_reductions = find_grad_reductions(graph)
    schedules: dict[int, Sequence[ScheduledCollective]] = {}
    for ranks in groups:
        schedule = trace_collectives(
            graph,
            mesh.coordinate_of(ranks[0]),
            gradients=gradients,
            grad_reductions=grad_reductions,
        )
        schedules.update(dict.fromkeys(ranks, schedule))
    compare_ranks(schedules, mesh)
    if gradients is not None:
        check_dependence(graph, mesh, gradients, _sample_coordinates(mesh))


def _sample_coordinates(mesh: Mesh) -> list[MeshCoordinate]:
    """All coordinates of a small mesh; of a large one, the ends and middle of each axis."""
    if mesh.num_ranks <= _MAX_TRACED_RANKS:
        return mesh.coordinates
    positions = [{0, 1, size // 2, size - 1} for size in mesh.sizes]
    return [
        coordinate
        for coordinate in mesh.coordinates
        if sum(position != 0 for position in coordinate.coordinates) <= 1
        and all(
            position in allowed
            for position, allowed in zip(coordinate.coordinates, positions, strict=True)
        )
    ]


def compare_ranks(schedules: Mapping[int, Sequence[ScheduledCollective]], mesh: Mesh) -> None:
    """Compare each rank with the first of each of its groups: all kinds and axes, and along the
    group's axis what is sent too."""
    compared: set[tuple[int, int, int]] = set()
    for rank, schedule in schedules.items():
        coordinate = mesh.coordinate_of(rank)
        for axis in range(len(mesh.sizes)):
            peer = mesh.group_ranks(axis, coordinate)[0]
            pair = (id(schedule), id(schedules[peer]), axis)
            if schedules[peer] is not schedule and pair not in compared:
                compared.add(pair)
                _compare_schedules((peer, schedules[peer]), (rank, schedule), axis, list(mesh.axes))


def group_ranks_by_shapes(graph: ShardingGraph, mesh: Mesh) -> list[tuple[int, ...]]:
    """The ranks, grouped by the local shapes of all values."""
    values = [value for value, _ in graph.inputs]
    values += [output for op_node in graph.op_nodes for output in op_node.outputs]
    specs: set[ShardSpec] = {value.spec for value in values if value.is_tensor}
    uneven = [spec for spec in specs if not spec.is_even(mesh.sizes)]
    ranks_by_shapes: dict[tuple[tuple[Size, ...], ...], list[int]] = {}
    for coordinate in mesh.coordinates:
        shapes = tuple(spec.local_shape(coordinate) for spec in uneven)
        ranks_by_shapes.setdefault(shapes, []).append(mesh.rank_at(coordinate))
    return [tuple(ranks) for ranks in ranks_by_shapes.values()]


def _compare_schedules(
    first: tuple[int, Sequence[ScheduledCollective]],
    second: tuple[int, Sequence[ScheduledCollective]],
    axis: int,
    names: list[str],
) -> None:
    for position, (expected, actual) in enumerate(zip_longest(first[1], second[1])):
        if _key(expected, axis) != _key(actual, axis):
            origin = (expected or actual).op_nodes[0].origin
            location = f"{origin.module or 'the program'}{', ' if origin.line else ''}{origin.line}"
            raise ParallelError(
                f"ranks {first[0]} and {second[0]} would issue different collectives at position "
                f"{position} ({location}): rank {first[0]} issues "
                f"{_describe_collective(expected, names)}, rank "
                f"{second[0]} {_describe_collective(actual, names)}. This is a bug in shardscope; "
                "please report the program."
            )


def _key(collective: ScheduledCollective | None, axis: int) -> tuple[object, ...] | None:
    if collective is None or collective.axis != axis:
        return None if collective is None else (collective.axis, collective.kind)
    return (
        collective.axis,
        collective.kind,
        collective.shape,
        collective.dtype,
        collective.reduction,
    )


def _describe_collective(collective: ScheduledCollective | None, names: list[str]) -> str:
    if collective is None:
        return "none"
    kind = f"{collective.kind}{f' ({collective.reduction})' if collective.reduction else ''}"
    dtype = str(collective.dtype).removeprefix("torch.")
    return f"{kind} of {dtype}{list(collective.shape)} along {names[collective.axis]}"
