"""The cost of a reshard in bytes, and the reason for it in words."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
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

START_BYTES = 16 * 1024
"""The bytes that could be sent in the time that a collective takes to start."""

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
