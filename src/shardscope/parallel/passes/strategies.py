"""How an op node can be sharded: its strategies along one axis, and its decomposition."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import sympy
import torch
from torch import fx
from torch.export import default_decompositions
from torch.fx.experimental.proxy_tensor import make_fx

from shardscope._torch.dispatch import is_overload, name_arguments, op_schema
from shardscope.parallel.ir.graph import (
    OpNode,
    Reshard,
    Strategy,
    SymbolicSizes,
    Value,
    map_nest,
    values_in,
)
from shardscope.parallel.ir.shard_spec import MeshCoordinate, ShardSpec
from shardscope.parallel.passes.from_export import lower_op, read_result
from shardscope.parallel.sharding_rules.builders import has_nonempty_shards
from shardscope.parallel.sharding_rules.context import OpCall, TensorSpec
from shardscope.parallel.sharding_rules.random import is_random, memory_order
from shardscope.parallel.sharding_rules.registry import find_decomposition, find_rule
from shardscope.plan.placements import Partial, Placement, Replicate, Shard, Size, divides

SYM_SIZE = torch.ops.aten.sym_size.int


def replicate_all(op_node: OpNode | Reshard) -> Strategy:
    """The strategy in which every rank computes the full result from replicated inputs."""
    num_outputs = sum(output.is_tensor for output in op_node.outputs)
    replicate = Replicate()
    return Strategy((replicate,) * len(op_node.inputs), (replicate,) * num_outputs)


@final
class StrategyLookup:
    """Lists the strategies of op nodes along one axis; equal calls are looked up once."""

    def __init__(self, *, axis: int, coordinate: MeshCoordinate, is_training: bool) -> None:
        self._axis = axis
        self._coordinate = coordinate
        self.is_training = is_training
        self._cache: dict[Hashable, list[Strategy]] = {}

    @property
    def num_ranks(self) -> int:
        return self._coordinate.sizes[self._axis]

    def list_strategies(
        self, op_node: OpNode | Reshard, input_placements: Sequence[Placement]
    ) -> list[Strategy]:
        """The strategies that run the node without communication, "all replicated" last."""
        if isinstance(op_node, Reshard):
            return [*_reshard_strategies(op_node, input_placements[0]), replicate_all(op_node)]
        if op_node.op is SYM_SIZE:  # needs no data
            return [Strategy(tuple(input_placements), ())]
        if not is_overload(op_node.op):
            return [replicate_all(op_node)]
        call = self.describe(op_node, input_placements)
        key = (
            op_node.op,
            _freeze(call.arguments),
            call.outputs,
            call.input_placements,
            call.is_training,
        )
        if key not in self._cache:
            self._cache[key] = list(self._apply_rule(call))
        return [*self._cache[key], replicate_all(op_node)]

    def describe(self, op_node: OpNode, input_placements: Sequence[Placement]) -> OpCall:
        """The call as sharding rules see it: tensors have their local shapes along earlier axes."""
        return describe_call(
            op_node,
            num_axes=self._axis,
            coordinate=self._coordinate,
            num_ranks=self.num_ranks,
            input_placements=tuple(input_placements),
            is_training=self.is_training and any(value.has_gradient for value in op_node.inputs),
        )

    def _apply_rule(self, call: OpCall) -> Iterator[Strategy]:
        rule = find_rule(call.op)
        if rule is None:
            return
        strategies = list(rule(call))
        for strategy in (*strategies, *_lift_to_blocks(strategies, call)):
            if _is_valid(strategy, call):
                yield strategy


def describe_call(
    op_node: OpNode,
    *,
    num_axes: int,
    coordinate: MeshCoordinate,
    num_ranks: int,
    input_placements: tuple[Placement, ...],
    is_training: bool,
) -> OpCall:
    """An op node, of an overload, as a call whose tensors are sharded along the first `num_axes`
    axes.
    """
    op = op_node.op
    assert is_overload(op)
    is_random_op = is_random(op)

    def spec_of(value: object) -> object:
        if not isinstance(value, Value):
            return value
        if not value.is_tensor:
            return value.scalar
        spec = _spec(value, num_axes, coordinate)
        if is_random_op:
            return replace(spec, memory_order=memory_order(value.example_tensor))
        return spec

    return OpCall(
        op=op,
        arguments=map_nest(op_node.arguments, spec_of),
        outputs=tuple(
            _spec(output, num_axes, coordinate) for output in op_node.outputs if output.is_tensor
        ),
        num_ranks=num_ranks,
        input_placements=input_placements,
        is_training=is_training,
    )


def _spec(value: Value, num_axes: int, coordinate: MeshCoordinate) -> TensorSpec:
    assert value.dtype is not None
    if not num_axes:
        return TensorSpec(value.shape, value.dtype)
    spec = ShardSpec(value.shape, tuple(value.placements[:num_axes]))
    first_coordinate = MeshCoordinate(coordinate.sizes[:num_axes], (0,) * num_axes)
    return TensorSpec(spec.local_shape(first_coordinate), value.dtype)


def _lift_to_blocks(strategies: Iterable[Strategy], call: OpCall) -> Iterator[Strategy]:
    """Permutation-invariant strategies, for inputs that are sharded in blocks or segments."""
    blocks = {
        placement
        for placement in call.input_placements
        if isinstance(placement, Shard) and not placement.is_plain
    }
    for strategy in strategies:
        if not strategy.is_permutation_invariant or len(_shard_sizes(strategy, call)) != 1:
            continue
        for block in blocks:
            pairs = zip(strategy.inputs, call.input_placements, strict=True)
            if any(
                placement == Shard(block.dim) and source == block for placement, source in pairs
            ):
                yield Strategy(
                    tuple(_in_blocks(placement, block) for placement in strategy.inputs),
                    tuple(_in_blocks(placement, block) for placement in strategy.outputs),
                )


def _in_blocks(placement: Placement, block: Shard) -> Placement:
    return block.at(placement.dim) if isinstance(placement, Shard) else placement


def _shard_sizes(strategy: Strategy, call: OpCall) -> set[Size]:
    pairs = (*zip(strategy.inputs, call.inputs, strict=True),)
    pairs += (*zip(strategy.outputs, call.outputs, strict=True),)
    return {spec.shape[placement.dim] for placement, spec in pairs if isinstance(placement, Shard)}


def _is_valid(strategy: Strategy, call: OpCall) -> bool:
    """Whether the shards of all tensors match, and none is empty under a max or min.

    Shards of one dim may be uneven; shards of dims of different sizes would not match then.
    """
    sizes = _shard_sizes(strategy, call)
    if any(isinstance(size, sympy.Expr) and not divides(call.num_ranks, size) for size in sizes):
        return False
    if len(sizes) > 1 and not all(divides(call.num_ranks, size) for size in sizes):
        return False
    reductions = {
        placement.reduction for placement in strategy.outputs if isinstance(placement, Partial)
    }
    # An empty shard has no maximum. An uneven vocabulary usually leaves no shard empty.
    is_empty_somewhere = not all(has_nonempty_shards(call, size) for size in sizes)
    return not (is_empty_somewhere and reductions - {"sum"})


def _reshard_strategies(reshard: Reshard, input_placement: Placement) -> Iterator[Strategy]:
    """Strategies of a reshard along another axis: shards of dims that it leaves alone, and sums."""
    resharded_dims = {
        placement.dim
        for placement in (reshard.source, reshard.target)
        if isinstance(placement, Shard)
    }
    reductions = {
        placement.reduction
        for placement in (reshard.source, reshard.target)
        if isinstance(placement, Partial)
    }
    if isinstance(input_placement, Shard) and input_placement.dim not in resharded_dims:
        yield Strategy((input_placement,), (input_placement,))
    if input_placement == Partial() and not reductions - {"sum"}:
        yield Strategy((input_placement,), (input_placement,))


def _freeze(nest: object) -> Hashable:
    if isinstance(nest, (list, tuple)):
        return tuple(_freeze(item) for item in nest)
    if isinstance(nest, dict):
        return tuple((key, _freeze(item)) for key, item in nest.items())
    if isinstance(nest, slice):
        return ("slice", _freeze((nest.start, nest.stop, nest.step)))
    # 1, 1.0 and True are equal, but not the same argument.
    return (type(nest), nest) if isinstance(nest, (int, float, bool)) else nest


@final
@dataclass(frozen=True)
class Decomposition:
    """Op nodes that compute what one op node did, and the values that replace its results."""

    op_nodes: list[OpNode]
    results: dict[Value, Value]  # old to new
    is_ours: bool  # written for sharding, not torch's own


def decompose(op_node: OpNode, sizes: SymbolicSizes) -> Decomposition | None:
    """The node's decomposition: our own, else torch's; None if there is none."""
    ours = find_decomposition(op_node.op) if is_overload(op_node.op) else None
    function = ours or _torch_decomposition(op_node.op)
    if function is None:
        return None
    graph, inputs = _trace_decomposition(function, op_node)
    if graph is None or _is_unchanged(graph, op_node.op):
        return None
    return _read_decomposition(graph, inputs, op_node, sizes, is_ours=ours is not None)


def _torch_decomposition(op: object) -> Callable[..., object] | None:
    if not is_overload(op):
        return None
    function: Callable[..., object] | None = default_decompositions().get(op)
    return function


def _trace_decomposition(
    function: Callable[..., object], op_node: OpNode
) -> tuple[fx.Graph | None, list[Value]]:
    """The graph of the function on the node's arguments, and the values of its placeholders."""
    inputs = list(
        dict.fromkeys(value for value in values_in(op_node.arguments) if _is_traced(value))
    )
    examples = [value.example for value in inputs]

    def call(*values: object) -> object:
        values_by_input = dict(zip(inputs, values, strict=True))
        arguments = map_nest(op_node.arguments, lambda item: _substitute(item, values_by_input))
        return function(*arguments.values()) if _is_positional(op_node) else function(**arguments)

    try:
        return make_fx(call, pre_dispatch=True)(*examples).graph, inputs
    except NotImplementedError:
        return None, inputs


def _is_traced(value: Value) -> bool:
    return value.is_tensor or isinstance(value.example, torch.SymInt)


def _substitute(item: object, values_by_input: dict[Value, object]) -> object:
    if not isinstance(item, Value):
        return item
    return values_by_input.get(item, item.example)


def _is_positional(op_node: OpNode) -> bool:
    return not any(argument.kwarg_only for argument in op_schema(op_node.op).arguments)


def _is_unchanged(graph: fx.Graph, op: object) -> bool:
    return [node.target for node in graph.nodes if node.op == "call_function"] == [op]


def _read_decomposition(
    graph: fx.Graph, inputs: list[Value], op_node: OpNode, sizes: SymbolicSizes, *, is_ours: bool
) -> Decomposition:
    known: dict[fx.Node, Any] = {}
    op_nodes: list[OpNode] = []
    placeholder_values = iter(inputs)
    result: object = None
    for node in graph.nodes:
        if node.op == "placeholder":
            known[node] = next(placeholder_values)
        elif node.op == "output":
            result = map_nest(node.args[0], lambda item: _value_of(item, known))
        elif node.op == "call_function":
            _read_call(node, known, op_nodes, op_node, sizes)
    return Decomposition(op_nodes, _match_results(op_node.result, result), is_ours)


def _read_call(
    node: fx.Node,
    known: dict[fx.Node, Any],
    op_nodes: list[OpNode],
    op_node: OpNode,
    sizes: SymbolicSizes,
) -> None:
    if node.target.__name__ == "getitem":  # type: ignore[union-attr]
        known[node] = known[node.args[0]][node.args[1]]  # type: ignore[index]
        return
    known[node] = read_result(f"{op_node.origin.node}_{node.name}", node.meta["val"], sizes)
    op = lower_op(node.target)
    arguments = name_arguments(op, node.args, node.kwargs)
    op_nodes.append(
        OpNode(
            op=op,
            arguments=map_nest(arguments, lambda item: _value_of(item, known)),
            outputs=list(values_in(known[node])),
            result=known[node],
            origin=replace(
                op_node.origin,
                op=str(node.target),
                part_of=op_node.origin.part_of or op_node.origin.op,
            ),
            is_rewritten=True,
        )
    )


def _value_of(item: object, known: dict[fx.Node, Any]) -> object:
    return known[item] if isinstance(item, fx.Node) else item


def _match_results(old: object, new: object) -> dict[Value, Value]:
    """By old result, the new value that replaces it."""
    pairs = list(zip(values_in(old), values_in(new), strict=True))
    for old_value, new_value in pairs:
        if new_value.origin is None and not new_value.placements:
            new_value.origin = old_value.root
    return dict(pairs)
