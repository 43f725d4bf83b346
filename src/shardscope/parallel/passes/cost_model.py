"""The costs of reshards and of strategies in bytes, and the reason for a reshard in words."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import final

import sympy

from shardscope.parallel.ir.graph import (
    OpNode,
    Origin,
    Reshard,
    Role,
    ShardingGraph,
    Strategy,
    Value,
    values_in,
)
from shardscope.parallel.ir.shard_spec import MeshCoordinate, ShardSpec
from shardscope.plan.placements import Partial, Placement, Replicate, Shard, Size, product

Hints = Mapping[sympy.Symbol, int]
"""By the symbol of a dynamic size, the size that the program was exported with."""

# Factors on the cost of resharding a parameter. On an axis that shards the data, weights are
# gathered to match the data; on other axes they stay as planned.
_FOLLOW_DATA, _KEEP_WEIGHTS = 1e-3, 100.0
_START_BYTES = 16 * 1024  # what could be sent while a collective starts
_GUESS = 64  # for a size that depends on data
_SLICE = 1e-6  # no communication, but a shard is worth less than the full tensor
_REGRET = 1.01  # of a shard that no constraint demands: it may have to be gathered again


def size_hint(size: Size, hints: Hints) -> int:
    """An estimate of a size, for comparing costs."""
    if isinstance(size, int):
        return size
    estimate = sympy.sympify(size).subs(dict(hints))
    return int(estimate.subs(dict.fromkeys(estimate.free_symbols, _GUESS)))


def reshard_bytes(value: Value, axis: int, coordinate: MeshCoordinate, hints: Hints) -> int:
    """The bytes of a value that is resharded: full along the axis, sharded along the others."""
    assert value.dtype is not None
    placements = [
        Replicate() if index == axis else placement
        for index, placement in enumerate(value.placements)
    ]
    sizes, position = coordinate.sizes[: len(placements)], coordinate.coordinates[: len(placements)]
    local = ShardSpec(value.shape, tuple(placements)).local_shape(MeshCoordinate(sizes, position))
    return size_hint(product(local), hints) * value.dtype.itemsize


def reshard_cost(source: Placement, target: Placement, *, is_constrained: bool = False) -> float:
    """The cost of a reshard per byte of the full value; infinite if there is no such reshard.

    `is_constrained`: the plan demands the target, so that it need not be undone later.
    """
    if source == target:
        return 0.0
    match source, target:
        case _, Partial():
            return math.inf
        case Replicate(), Shard():
            return _SLICE
        case Shard(), Replicate():
            return 1.0
        case Shard(), Shard():
            return 0.5 if is_constrained else 1.0 + _SLICE
        case Partial(), Replicate():
            return 2.0
        case _:  # partial to sharded
            return 1.0 if is_constrained else 1.0 + _REGRET


@final
@dataclass
class StrategyCosts:
    """What a strategy costs along one mesh axis, in bytes, given the placements chosen so far.

    `module_outputs` are placements that the plan demands. If `is_data_axis`, weights follow the
    data, not the data the weights. The propagation keeps the other fields up to date.
    """

    axis: int
    coordinate: MeshCoordinate
    hints: Hints
    module_outputs: Mapping[Value, Placement]
    is_data_axis: bool
    resharded_values: dict[tuple[Value, Placement], Value] = field(default_factory=dict)
    parameters: set[Value] = field(default_factory=set)
    num_uses: Counter[Value] = field(default_factory=Counter)
    buffer_placements: dict[Value, Placement] = field(default_factory=dict)  # of their new values

    def strategy_cost(self, op_node: OpNode | Reshard, strategy: Strategy) -> float:
        """The cost in bytes of resharding the inputs, and the outputs that the plan constrains."""
        constraint = self.output_constraint(op_node)
        total = 0.0
        for value, target in {(v, p) for v, p in zip(op_node.inputs, strategy.inputs, strict=True)}:
            is_constrained = target == constraint or constraint in strategy.outputs
            total += self._reshard_cost(value, target, is_constrained=is_constrained)
            total += self._partial_cost(op_node, value, target)
        outputs = [output for output in op_node.outputs if output.is_tensor]
        for value, placement in zip(outputs, strategy.outputs, strict=True):
            target = self.module_outputs.get(value.root, placement)
            if target != placement:
                total += _cost_of(
                    reshard_cost(placement, target, is_constrained=True), self.num_bytes(value)
                )
            total += self.buffer_cost(value, placement)
        return total + self._sharding_cost(outputs, strategy)

    def _sharding_cost(self, outputs: Sequence[Value], strategy: Strategy) -> float:
        """The cost of a sharded result of replicated inputs: as much as slicing it.

        So a value that is computed from replicated values only stays replicated, unless the plan
        wants it sharded or a later op has a sharded argument to combine it with.
        """
        if any(not isinstance(placement, Replicate) for placement in strategy.inputs):
            return 0.0
        return sum(
            reshard_cost(Replicate(), placement) * self.num_bytes(value)
            for value, placement in zip(outputs, strategy.outputs, strict=True)
            if isinstance(placement, Shard)
        )

    def buffer_cost(self, value: Value, placement: Placement) -> float:
        """The cost of resharding a buffer's new value to the buffer's placement.

        That is a collective of its own. Such values are small; the number of collectives costs.
        """
        required = self.buffer_placements.get(value, placement)
        if reshard_cost(placement, required) < 1:
            return 0.0
        return _START_BYTES + reshard_cost(placement, required) * self.num_bytes(value)

    def _reshard_cost(self, value: Value, target: Placement, *, is_constrained: bool) -> float:
        if (value, target) in self.resharded_values:
            return 0.0
        sources = [value.placements[self.axis]]
        if (value, Replicate()) in self.resharded_values:
            sources.append(Replicate())
        cost_per_byte = min(
            reshard_cost(source, target, is_constrained=is_constrained) for source in sources
        )
        is_collective = cost_per_byte > reshard_cost(Replicate(), Shard(0))
        if is_collective and value.root in self.parameters:
            cost_per_byte *= _FOLLOW_DATA if self.is_data_axis else _KEEP_WEIGHTS
        return _cost_of(cost_per_byte, self.num_bytes(value)) if cost_per_byte else 0.0

    def _partial_cost(self, op_node: OpNode | Reshard, value: Value, target: Placement) -> float:
        """The cost of leaving a value partial and reducing what is computed from it instead.

        Nothing, unless several ops would be reduced, or a result that is larger than the value.
        """
        if not isinstance(target, Partial) or isinstance(op_node, Reshard):
            return 0.0
        if self.num_uses[value] > 1:
            return 2.5 * self.num_bytes(value)
        growth = sum(
            self.num_bytes(output) for output in op_node.outputs if output.is_tensor
        ) - self.num_bytes(value)
        return 2.0 * max(0, growth)

    def output_constraint(self, op_node: OpNode | Reshard) -> Placement | None:
        """The placement that the plan demands of the node's outputs; None if it demands none."""
        placements = [self.module_outputs.get(output.root) for output in op_node.outputs]
        return next((placement for placement in placements if placement is not None), None)

    def num_bytes(self, value: Value) -> int:
        """The bytes of a value that is resharded along the axis."""
        return reshard_bytes(value, self.axis, self.coordinate, self.hints)


def _cost_of(cost_per_byte: float, num_bytes: int) -> float:
    """The cost of `num_bytes`; infinite if impossible, also for an empty tensor."""
    return cost_per_byte if cost_per_byte == math.inf else cost_per_byte * num_bytes


def reshard_kind(source: Placement, target: Placement) -> str:
    """The collective of a reshard, "slice" where it needs none."""
    match source, target:
        case Replicate(), Shard():
            return "slice"
        case Shard(), Replicate():
            return "all_gather"
        case Shard(), Shard():
            return "all_to_all"
        case Partial(), Shard():
            return "reduce_scatter"
        case _:
            return "all_reduce"


def describe_need(op_node: OpNode | Reshard, strategy: Strategy, position: int) -> str:
    """Why a node's input is resharded: `aten.linear's mm needs its mat2 sharded along dim 0`."""
    how = _describe_placement(strategy.inputs[position])
    if isinstance(op_node, Reshard):
        return f"a redistribution along another axis needs it {how}"
    op = _name_op(op_node.origin)
    if len(strategy.inputs) == 1:
        return f"{op} needs it {how}"
    if all(placement == strategy.inputs[position] for placement in strategy.inputs):
        return f"{op} needs {'both' if len(strategy.inputs) == 2 else 'all'} {how}"
    name = list(_argument_names(op_node.arguments))[position]
    return f"{op} needs its {'input' if name == 'self' else name} {how}"


def describe_transfer(role: Role, placement: Placement) -> str:
    """Why an output of the program is resharded: `the program returns it replicated`."""
    how = _describe_placement(placement)
    if role.kind == "output":
        return f"the program returns it {how}"
    if role.kind == "decomposed":
        return f"what it is a part of has it {how}"
    return f"the new {role.name} is {how}"


def shorten_op(op: str) -> str:
    """An op's name without its overload: `aten.add` for `aten.add.Tensor`."""
    parts = op.split(".")
    return ".".join(parts[:2]) if len(parts) == 3 else op


def _name_op(origin: Origin) -> str:
    """An op's name: `aten.add`, or `aten.linear's add` if aten.linear was decomposed into it."""
    op = shorten_op(origin.op)
    return f"{shorten_op(origin.part_of)}'s {op.rpartition('.')[2]}" if origin.part_of else op


def _describe_placement(placement: Placement) -> str:
    if isinstance(placement, Replicate):
        return "replicated"
    return (
        f"sharded along dim {placement.dim}"
        if isinstance(placement, Shard)
        else ("as partial sums")
    )


def _argument_names(arguments: dict[str, object]) -> Iterator[str]:
    """The name of each tensor argument, in order."""
    for name, nest in arguments.items():
        yield from (
            name for value in values_in(nest) if isinstance(value, Value) and value.is_tensor
        )


@final
class GradientNames:
    """Describes why a gradient is communicated, with the module names of the user's program."""

    def __init__(self, graph: ShardingGraph) -> None:
        self._roles = dict(graph.inputs)
        self._producers: dict[Value, Origin] = {}
        for op_node in graph.op_nodes:
            # A part of a decomposition computes the original's values.
            if isinstance(op_node, OpNode):
                outputs = [*op_node.outputs, *(value.root for value in op_node.outputs)]
                self._producers.update(dict.fromkeys(outputs, op_node.origin))

    def describe(
        self, value: Value, op_nodes: Sequence[OpNode | Reshard], *, is_grad_reduction: bool
    ) -> str:
        """The cause of a collective: `gradient of norm.weight, which layers.0.norm uses sharded`.

        `op_nodes` are the nodes whose backward needs it: the reshard that is differentiated, or,
        for a gradient reduction, the sharded ops that read the value.
        """
        user = op_nodes[0].origin.module
        if not is_grad_reduction:
            cause = op_nodes[0].cause if isinstance(op_nodes[0], Reshard) else ""
            return f"gradient of {self._name(value.root, None)} (forward: {cause})"
        users = list(dict.fromkeys(op_node.origin.module for op_node in op_nodes))
        more = f" and {len(users) - 1} more modules use" if len(users) > 1 else " uses"
        what = self._name(value.root, user)
        return f"gradient of {what}, which {user or 'the program'}{more} sharded"

    def _name(self, value: Value, user: str | None) -> str:
        role, producer = self._roles.get(value), self._producers.get(value)
        if role is not None:
            return f"the input {role.name}" if role.kind == "input" else role.name
        if producer is None:
            return value.name
        if producer.module and producer.module != user:
            return f"the output of {producer.module}"
        return f"{shorten_op(producer.part_of or producer.op)}'s result"
