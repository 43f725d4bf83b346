"""Sharding propagation along one mesh axis.

Op nodes are visited in program order. For each, the cheapest strategy is chosen given the
placements of its inputs; inputs in other placements are resharded first. Placements that the plan
demands at module boundaries and of outputs are met by further reshards. An op that could only run
on gathered inputs is decomposed if that costs less.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, final

import torch

from shardscope.errors import PlanError
from shardscope.parallel.ir.graph import (
    OpNode,
    Origin,
    Reshard,
    Role,
    ShardingGraph,
    Strategy,
    Value,
    error_context,
    map_nest,
    values_in,
)
from shardscope.parallel.ir.shard_spec import MeshCoordinate
from shardscope.parallel.passes.cost_model import (
    Hints,
    StrategyCosts,
    describe_need,
    describe_transfer,
    reshard_cost,
)
from shardscope.parallel.passes.strategies import Decomposition, StrategyLookup, decompose
from shardscope.plan.placements import Partial, Placement, Replicate, Shard
from shardscope.record import FallbackKind

_MAX_DEPTH = 3  # of decompositions inside decompositions


@final
@dataclass(frozen=True)
class AxisConstraints:
    """The placements that the plan demands along one axis."""

    inputs: dict[Value, Placement]  # of the program's inputs; replicated if absent
    module_inputs: dict[tuple[str, Value], Placement]  # by module call and value
    module_outputs: dict[Value, Placement]
    outputs: Callable[[Role], Placement | None]  # None: as it comes, but never partial
    is_data_axis: bool = False  # weights follow the data, not the data the weights
    # By value, the module whose output it is.
    exited_modules: dict[Value, str] = field(default_factory=dict)


@final
@dataclass(frozen=True)
class Fallback:
    """An op that has no strategy for the placements of its inputs."""

    axis: int
    kind: FallbackKind
    origin: Origin
    placements: tuple[Placement, ...]  # of its tensor arguments, before resharding
    size_bytes: int  # communicated because of it


def propagate_axis(
    graph: ShardingGraph,
    *,
    axis: int,
    coordinate: MeshCoordinate,
    constraints: AxisConstraints,
    is_training: bool = False,
) -> list[Fallback]:
    """Assign every value of the graph a placement along the axis, and insert the reshards.

    Appends to the `placements` of each value and the `strategies` of each node, and replaces
    `graph.op_nodes` and `graph.outputs`. Returns the ops that had to fall back.
    """
    strategy_lookup = StrategyLookup(axis=axis, coordinate=coordinate, is_training=is_training)
    return _AxisPropagation(
        graph, axis, coordinate, constraints, graph.sizes.hints, strategy_lookup
    ).run()


class _NoReshardError(PlanError):
    """No reshard leads to the placement that a constraint demands."""


@final
@dataclass(frozen=True)
class _Checkpoint:
    """The state of a propagation, to return to when a decomposition does not pay."""

    num_op_nodes: int
    resharded_values: set[tuple[Value, Placement]]
    current_values: dict[Value, Value]
    fallbacks: list[Fallback]
    spent_bytes: float


@final
@dataclass
class _AxisPropagation:
    """The propagation of one graph along one axis, and what it has produced so far."""

    graph: ShardingGraph
    axis: int
    coordinate: MeshCoordinate
    constraints: AxisConstraints
    hints: Hints
    strategy_lookup: StrategyLookup
    op_nodes: list[OpNode | Reshard] = field(default_factory=list)
    # By value, what it is after resharding or decomposition.
    current_values: dict[Value, Value] = field(default_factory=dict)
    fallbacks: list[Fallback] = field(default_factory=list)
    producers: dict[Value, OpNode | Reshard] = field(default_factory=dict)
    spent_bytes: float = 0.0

    def __post_init__(self) -> None:
        self.costs = StrategyCosts(
            self.axis,
            self.coordinate,
            self.hints,
            self.constraints.module_outputs,
            self.constraints.is_data_axis,
        )

    def run(self) -> list[Fallback]:
        for value, role in self.graph.inputs:
            value.placements.append(self.constraints.inputs.get(value, Replicate()))
            value.has_gradient = value.is_tensor and value.example_tensor.requires_grad
            if role.kind == "parameter":
                self.costs.parameters.add(value)
        for op_node in self.graph.op_nodes:
            self.costs.num_uses.update(set(values_in(_arguments(op_node))))
        self.costs.buffer_placements = {
            value: placement
            for value, placement in self._buffer_constraints()
            if placement is not None
        }
        for op_node in self.graph.op_nodes:
            with error_context(op_node.origin, "sharded"):
                self._advance(op_node)
        self.graph.outputs = [self._place_output(item, role) for item, role in self.graph.outputs]
        self.graph.op_nodes = self.op_nodes
        return self.fallbacks

    def _buffer_constraints(self) -> Iterator[tuple[Value, Placement | None]]:
        for item, role in self.graph.outputs:
            if role.kind == "mutation" and isinstance(item, Value):
                yield item, self.constraints.outputs(role)

    def _advance(self, op_node: OpNode | Reshard, depth: int = 0) -> None:
        """Choose the node's strategy, reshard its inputs to match, and place its outputs."""
        self._apply_input_constraints(op_node)
        strategy, cost = self._choose_strategy(op_node)
        gathered = self._gathers_input(op_node, strategy)
        if gathered and depth < _MAX_DEPTH and self._advance_decomposed(op_node, cost, depth):
            return
        if (
            gathered
            and not self._only_gathers_parameters(op_node, strategy)
            and not self._has_local_strategy(op_node)
        ):
            self._record_fallback(FallbackKind.REPLICATE, op_node, cost)
        self._apply_strategy(op_node, strategy)

    def _apply_input_constraints(self, op_node: OpNode | Reshard) -> None:
        """Replace each argument by its current value, resharded as its module's inputs must be."""

        def find(item: object) -> object:
            if not isinstance(item, Value):
                return item
            value = self.current_values.get(item, item)
            if not value.is_tensor or isinstance(op_node, Reshard):
                return value
            for call, module in op_node.origin.calls:
                placement = self.constraints.module_inputs.get((call, value.root))
                if placement is not None and not _has_placement(value, placement):
                    cause = f"the plan's input of {module or 'the program'}"
                    value = self._reshard(value, placement, op_node.origin, cause)
            return value

        _set_arguments(op_node, map_nest(_arguments(op_node), find))

    def _choose_strategy(self, op_node: OpNode | Reshard) -> tuple[Strategy, float]:
        input_placements = [self._placement(value) for value in op_node.inputs]
        strategies = self.strategy_lookup.list_strategies(op_node, input_placements)
        costs = [
            (
                self.costs.strategy_cost(op_node, strategy),
                -_num_unchanged(strategy, input_placements),
                i,
            )
            for i, strategy in enumerate(strategies)
        ]
        cost, _, index = min(costs)
        return strategies[index], cost

    def _apply_strategy(self, op_node: OpNode | Reshard, strategy: Strategy) -> None:
        targets = iter(enumerate(strategy.inputs))

        def reshard_input(item: object) -> object:
            if not isinstance(item, Value) or not item.is_tensor:
                return item
            position, target = next(targets)
            if self._placement(item) == target:
                return item
            cause = self._describe_cause(op_node, strategy, position)
            return self._reshard(item, target, op_node.origin, cause)

        _set_arguments(op_node, map_nest(_arguments(op_node), reshard_input))
        placements = iter(strategy.outputs)
        for value in op_node.outputs:
            value.placements.append(next(placements) if value.is_tensor else Replicate())
            value.has_gradient = _passes_gradient(op_node, value)
        op_node.strategies.append(strategy)
        self.op_nodes.append(op_node)
        self.producers.update(dict.fromkeys(op_node.outputs, op_node))
        for value in op_node.outputs:
            constraint = self.constraints.module_outputs.get(value.root)
            if constraint is not None and not isinstance(op_node, Reshard):
                cause = self._describe_module_output(op_node, value)
                self.current_values[value] = self._reshard(value, constraint, op_node.origin, cause)

    def _describe_cause(self, op_node: OpNode | Reshard, strategy: Strategy, position: int) -> str:
        constraint = self.costs.output_constraint(op_node)
        is_decomposed = isinstance(op_node, OpNode) and op_node.is_rewritten
        if is_decomposed and constraint is not None and strategy.inputs[position] == constraint:
            return self._describe_module_output(op_node, op_node.outputs[0])
        return describe_need(op_node, strategy, position)

    def _describe_module_output(self, op_node: OpNode | Reshard, value: Value) -> str:
        module = self.constraints.exited_modules.get(value.root, op_node.origin.module)
        return f"the plan's output of {module or 'the program'}"

    def _reshard(self, value: Value, target: Placement, origin: Origin, cause: str) -> Value:
        if self._placement(value) == target:
            return value
        if (value, target) not in self.costs.resharded_values:
            self.costs.resharded_values[value, target] = self._insert_reshard(
                value, target, origin, cause
            )
        return self.costs.resharded_values[value, target]

    def _insert_reshard(self, value: Value, target: Placement, origin: Origin, cause: str) -> Value:
        replicated = self.costs.resharded_values.get((value, Replicate()))
        start = replicated if replicated is not None and isinstance(target, Shard) else value
        source = self._placement(start)
        cost_per_byte = reshard_cost(source, target, is_constrained=True)
        if cost_per_byte == math.inf:
            raise _NoReshardError(
                f"the plan wants {value.name} to be {target} along axis {self.axis} of the mesh, "
                f"but it is {source}, which cannot be turned into partial sums. Leave that "
                "placement out of the plan."
            )
        self.spent_bytes += cost_per_byte * self.costs.num_bytes(value)
        output = Value(
            f"{value.name}_{len(self.costs.resharded_values)}",
            shape=value.shape,
            dtype=value.dtype,
            placements=[*start.placements[: self.axis], target],
            example=value.example,
            has_gradient=value.has_gradient,
            origin=value.root,
        )
        sharded = self._recompute_shard(start, output)
        if sharded is not None:
            self.op_nodes.append(sharded)
            return output
        self.op_nodes.append(
            Reshard(
                axis=self.axis,
                value=start,
                output=output,
                source=source,
                target=target,
                origin=origin,
                cause=cause,
                strategies=[None] * (self.axis + 1),
            )
        )
        return output

    def _recompute_shard(self, value: Value, output: Value) -> OpNode | None:
        """The node that computes a replicated value, rewritten to compute only its shard `output`.

        Only an op such as expand can do so from replicated inputs. The gradient of its input is
        then reduced, which is smaller than the value whose gradient would have to be gathered.
        """
        op_node, target = self.producers.get(value), output.placements[self.axis]
        if (
            not isinstance(op_node, OpNode)
            or not isinstance(target, Shard)
            or len(op_node.outputs) > 1
        ):
            return None
        replicated = (Replicate(),) * len(op_node.inputs)
        if (
            self._placement(value) != Replicate()
            or op_node.strategies[self.axis].inputs != replicated
        ):
            return None
        for strategy in self.strategy_lookup.list_strategies(op_node, replicated):
            if strategy.inputs == replicated and strategy.outputs == (target,):
                strategies = [*op_node.strategies[: self.axis], strategy]
                return replace(op_node, outputs=[output], result=output, strategies=strategies)
        return None

    def _place_output(self, item: object, role: Role) -> tuple[object, Role]:
        if not isinstance(item, Value) or not item.is_tensor:
            return item, role
        value = self.current_values.get(item, item)
        placement = self.constraints.outputs(role)
        if placement is None and isinstance(self._placement(value), Partial):
            placement = Replicate()
        if placement is None:
            return value, role
        return self._reshard(value, placement, Origin(), describe_transfer(role, placement)), role

    def _advance_decomposed(self, op_node: OpNode | Reshard, cost: float, depth: int) -> bool:
        """Propagate through the node's decomposition; return whether it costs less than `cost`."""
        decomposition = (
            decompose(op_node, self.graph.sizes) if isinstance(op_node, OpNode) else None
        )
        if decomposition is None:
            return False
        checkpoint = self._checkpoint()
        try:
            self._advance_parts(op_node, decomposition, depth)
        except _NoReshardError:
            self._restore(checkpoint)
            return False
        cost_decomposed = (
            self.spent_bytes - checkpoint.spent_bytes + self._buffer_costs(decomposition)
        )
        if cost_decomposed >= cost:
            self._restore(checkpoint)
            return False
        if not decomposition.is_ours:
            self._record_fallback(FallbackKind.DECOMPOSITION, op_node, cost_decomposed)
        return True

    def _buffer_costs(self, decomposition: Decomposition) -> float:
        results = (
            (value, self._placement(self.current_values[value])) for value in decomposition.results
        )
        return sum(
            self.costs.buffer_cost(value, placement)
            for value, placement in results
            if value.is_tensor
        )

    def _advance_parts(
        self, op_node: OpNode | Reshard, decomposition: Decomposition, depth: int
    ) -> None:
        op_nodes, results = self._propagate_earlier_axes(decomposition)
        for part in op_nodes:
            self.costs.num_uses.update(set(values_in(_arguments(part))))
            self._advance(part, depth + 1)
        for old, new in zip(decomposition.results, results, strict=True):
            self.current_values[old] = self.current_values.get(new, new)

    def _propagate_earlier_axes(
        self, decomposition: Decomposition
    ) -> tuple[list[OpNode | Reshard], list[Value]]:
        """Propagate the decomposition along earlier axes, to the node's result placements."""
        results: list[tuple[object, Role]] = [
            (new, Role("decomposed", str(i)))
            for i, new in enumerate(decomposition.results.values())
        ]
        graph = ShardingGraph(
            inputs=[],
            op_nodes=list(decomposition.op_nodes),
            outputs=results,
            sizes=self.graph.sizes,
        )
        old_results = list(decomposition.results)
        for axis in range(self.axis):
            placements = [old.placements[axis] for old in old_results]
            constraints = AxisConstraints(
                {}, {}, {}, outputs=partial(_numbered_placement, placements)
            )
            strategy_lookup = StrategyLookup(
                axis=axis, coordinate=self.coordinate, is_training=self.strategy_lookup.is_training
            )
            propagation = _AxisPropagation(
                graph, axis, self.coordinate, constraints, self.hints, strategy_lookup
            )
            self.fallbacks += propagation.run()
            self.spent_bytes += propagation.spent_bytes
        return graph.op_nodes, [value for value, _ in graph.outputs if isinstance(value, Value)]

    def _checkpoint(self) -> _Checkpoint:
        return _Checkpoint(
            len(self.op_nodes),
            set(self.costs.resharded_values),
            dict(self.current_values),
            list(self.fallbacks),
            self.spent_bytes,
        )

    def _restore(self, checkpoint: _Checkpoint) -> None:
        del self.op_nodes[checkpoint.num_op_nodes :]
        self.costs.resharded_values = {
            key: value
            for key, value in self.costs.resharded_values.items()
            if key in checkpoint.resharded_values
        }
        self.current_values, self.fallbacks, self.spent_bytes = (
            checkpoint.current_values,
            checkpoint.fallbacks,
            checkpoint.spent_bytes,
        )

    def _gathers_input(self, op_node: OpNode | Reshard, strategy: Strategy) -> bool:
        """Whether the strategy gathers, or reshards to another dim, a sharded input."""
        targets = zip(op_node.inputs, strategy.inputs, strict=True)
        return any(
            isinstance(self._placement(value), Shard) and self._placement(value) != target
            for value, target in targets
        )

    def _has_local_strategy(self, op_node: OpNode | Reshard) -> bool:
        """Whether a strategy that gathers no input exists, only at a higher cost."""
        strategies = self.strategy_lookup.list_strategies(
            op_node, [self._placement(value) for value in op_node.inputs]
        )
        return any(
            not self._gathers_input(op_node, strategy)
            and self.costs.strategy_cost(op_node, strategy) < math.inf
            for strategy in strategies
        )

    def _only_gathers_parameters(self, op_node: OpNode | Reshard, strategy: Strategy) -> bool:
        """Whether only parameters are gathered, to match sharded data."""
        targets = zip(op_node.inputs, strategy.inputs, strict=True)
        gathered = [v for v, target in targets if self._placement(v) not in (target, Replicate())]
        return self.constraints.is_data_axis and all(
            value.root in self.costs.parameters for value in gathered
        )

    def _record_fallback(self, kind: FallbackKind, op_node: OpNode | Reshard, cost: float) -> None:
        input_placements = tuple(self._placement(value) for value in op_node.inputs)
        self.fallbacks.append(
            Fallback(self.axis, kind, op_node.origin, input_placements, int(cost))
        )

    def _placement(self, value: Value) -> Placement:
        return value.placements[self.axis]


def _num_unchanged(strategy: Strategy, input_placements: Sequence[Placement]) -> int:
    return sum(
        target == source for target, source in zip(strategy.inputs, input_placements, strict=True)
    )


def _passes_gradient(op_node: OpNode | Reshard, output: Value) -> bool:
    if isinstance(op_node, OpNode) and op_node.op is torch.ops.aten.detach.default:
        return False
    is_differentiable = output.dtype is not None and (
        output.dtype.is_floating_point or output.dtype.is_complex
    )
    return is_differentiable and any(value.has_gradient for value in op_node.inputs)


def _has_placement(value: Value, placement: Placement) -> bool:
    return value.placements[-1] == placement


def _arguments(op_node: OpNode | Reshard) -> Any:
    return op_node.arguments if isinstance(op_node, OpNode) else op_node.value


def _set_arguments(op_node: OpNode | Reshard, arguments: Any) -> None:
    if isinstance(op_node, OpNode):
        op_node.arguments = arguments
    else:
        op_node.value = arguments


def _numbered_placement(placements: list[Placement], role: Role) -> Placement:
    """The placement of the output whose role's name is its number."""
    return placements[int(role.name)]
