"""The collective schedule of a rank: its collectives in order, without lowering its program.

Only reshards issue collectives, and gradient reductions. They are lowered as for the rank's
program, but on meta tensors, by an emitter that records the collectives instead of writing them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast, final

import torch
from torch import Tensor, fx

from shardscope.parallel.ir.graph import OpNode, Reshard, ShardingGraph, Value
from shardscope.parallel.ir.shard_spec import MeshCoordinate
from shardscope.parallel.passes.cost_model import Hints, size_hint
from shardscope.parallel.passes.grad_reduction import (
    Gradients,
    GradReductions,
    find_grad_reductions,
)
from shardscope.parallel.passes.reshard import lower_reshard
from shardscope.parallel.passes.strategies import SYM_SIZE
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
        value = cast(fx.Node, self._meta_tensor(reshard.value))
        builder, emitter = cast(Any, self._builder), cast(Any, self._emitter)
        lower_reshard(
            reshard,
            value,
            coordinate=self._coordinate,
            builder=builder,
            emitter=emitter,
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

    def write(self, op: Any, /, *args: Any, **kwargs: Any) -> Any:
        return op(*args, **kwargs)

    def item(self, value: Any, index: int) -> Any:
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
