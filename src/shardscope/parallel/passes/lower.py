"""Lowers the graph to one rank's program: local ops, local sizes, and collectives for reshards."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import sympy
import torch
from torch import fx, nn
from torch.fx.node import Argument

from shardscope._torch.dispatch import OpOverload, is_overload, op_packet, op_schema
from shardscope.parallel.ir.graph import (
    Attribute,
    OpNode,
    Reshard,
    ShardingGraph,
    Value,
    error_context,
    map_nest,
)
from shardscope.parallel.ir.shard_spec import MeshCoordinate, ShardSpec
from shardscope.parallel.passes.grad_reduction import find_grad_reductions
from shardscope.parallel.passes.reshard import CollectiveEmitter, lower_reshard
from shardscope.parallel.passes.strategies import SYM_SIZE, describe_call
from shardscope.parallel.sharding_rules.context import GraphBuilder, LocalSize, LoweringContext
from shardscope.parallel.sharding_rules.registry import find_lowering
from shardscope.plan.placements import Placement, Size

_Write = Callable[..., fx.Node]


@final
class LocalSizes:
    """Local dynamic sizes as nodes: reads each from an input's shape and computes others once."""

    def __init__(self, write: _Write) -> None:
        self._write = write
        self._nodes_by_size: dict[sympy.Expr, fx.Node] = {}
        self._sources: dict[sympy.Symbol, tuple[fx.Node, int, int]] = {}

    def add_shape(self, node: fx.Node, shape: tuple[Size, ...]) -> None:
        """Register the local shape of an input, from which its symbols can be read."""
        for dim, size in enumerate(shape):
            symbols = list(getattr(size, "free_symbols", ()))
            if len(symbols) == 1:
                symbol = symbols[0]
                factor = sympy.cancel(size / symbol)
                if factor.is_Integer:
                    self._sources.setdefault(symbol, (node, dim, int(factor)))

    def add_node(self, node: fx.Node, size: object) -> None:
        """Register a node that computes this size."""
        if isinstance(size, sympy.Expr):
            self._nodes_by_size.setdefault(size, node)

    def find(self, size: Size) -> LocalSize:
        """The size as an op's argument: an int, or the node that computes it."""
        if isinstance(size, (int, sympy.Integer)):
            return int(size)
        size = sympy.cancel(size)
        if size not in self._nodes_by_size:
            self._nodes_by_size[size] = self._compute(size)
        return self._nodes_by_size[size]

    def _compute(self, size: sympy.Expr) -> fx.Node:
        if size.is_Symbol:
            node, dim, factor = self._sources[size]
            size_node = self._write(torch.ops.aten.sym_size.int, node, dim)
            return size_node if factor == 1 else self._write(operator.floordiv, size_node, factor)
        numerator, denominator = sympy.fraction(sympy.together(size))
        if denominator != 1:
            return self._write(operator.floordiv, self.find(numerator), self.find(denominator))
        operation = operator.mul if size.is_Mul else operator.add
        assert size.is_Mul or size.is_Add or size.is_Pow, f"no way to compute the size {size}"
        if size.is_Pow:
            base, power = size.args
            return self._write(operator.pow, self.find(base), int(power))
        first, *rest = size.args
        total = self.find(first)
        for term in rest:
            total = self._write(operation, total, self.find(term))
        return total  # type: ignore[return-value]


@final
class RankProgram:
    """The FX graph of one rank.

    `nodes` has, by value of the ShardingGraph, the node that computes the rank's shard of it, and
    `reshards` the nodes of each reshard.
    """

    def __init__(self, coordinate: MeshCoordinate) -> None:
        self.coordinate = coordinate
        self.graph = fx.Graph()
        self.nodes: dict[Value, LocalSize] = {}  # a size may be a number
        self.reshards: dict[Reshard, list[fx.Node]] = {}
        self.attributes: dict[str, object] = {}

    def as_module(self) -> fx.GraphModule:
        """The graph as a module with its attributes; parameters and buffers are inputs."""
        module = nn.Module()
        for name, value in self.attributes.items():
            setattr(module, name, value)
        return fx.GraphModule(module, self.graph)


def lower_rank(
    graph: ShardingGraph,
    coordinate: MeshCoordinate,
    make_emitter: Callable[[GraphBuilder], CollectiveEmitter],
) -> RankProgram:
    """The program of the rank at this mesh coordinate; `make_emitter` chooses the collectives."""
    return _RankLowering(graph, coordinate, make_emitter).lower_graph()


@final
class _RankLowering:
    """Builds the FX graph of one rank; also the GraphBuilder that lowerings and emitters use."""

    def __init__(
        self,
        graph: ShardingGraph,
        coordinate: MeshCoordinate,
        make_emitter: Callable[[GraphBuilder], CollectiveEmitter],
    ) -> None:
        self._graph = graph
        self._coordinate = coordinate
        self._program = RankProgram(coordinate)
        self._fx_graph = self._program.graph
        self._nodes = self._program.nodes
        self._sizes = LocalSizes(self.write)
        self._emitter = make_emitter(self)
        self._grad_reductions = find_grad_reductions(graph)
        self._grad_reduced: dict[tuple[Value, tuple[int, ...]], fx.Node] = {}
        self._meta: Mapping[str, Any] = {}
        self._new_nodes: list[fx.Node] = []

    def lower_graph(self) -> RankProgram:
        for value, _ in self._graph.inputs:
            self._write_input(value)
        for op_node in self._graph.op_nodes:
            self._meta = op_node.origin.meta
            self._new_nodes = []
            with error_context(op_node.origin, "written for one rank"):
                if isinstance(op_node, Reshard):
                    self._lower_reshard(op_node)
                else:
                    self._lower_op_node(op_node)
        self._fx_graph.output(tuple(self._local(item) for item, _ in self._graph.outputs))
        return self._program

    # The GraphBuilder protocol.

    def write(self, op: Callable[..., object], /, *args: Argument, **kwargs: Argument) -> fx.Node:
        if is_overload(op):
            args, kwargs = _positional_arguments(op, args, kwargs)
        node = self._fx_graph.create_node("call_function", op, args, kwargs, name=_node_name(op))
        node.meta.update(self._meta)
        self._new_nodes.append(node)
        return node

    def item(self, value: fx.Node, index: int) -> fx.Node:
        return self.write(operator.getitem, value, index)

    def size(self, value: Size) -> LocalSize:
        return self._sizes.find(value)

    def _write_input(self, value: Value) -> None:
        node = self._fx_graph.placeholder(value.name)
        node.name = node.target = value.name  # also if it is a builtin's name, such as `input`
        self._nodes[value] = node
        if value.is_tensor:
            self._sizes.add_shape(node, value.spec.local_shape(self._coordinate))
        else:
            self._sizes.add_node(node, value.scalar)

    def _lower_reshard(self, reshard: Reshard) -> None:
        value = self._allreduce_grad(
            reshard.value, self._grad_reductions.axes_to_reduce(reshard, 0)
        )
        self._nodes[reshard.output] = lower_reshard(
            reshard,
            value,
            coordinate=self._coordinate,
            builder=self,
            emitter=self._emitter,
            has_partial_grad=self._grad_reductions.has_partial_grad(reshard.output, reshard.axis),
        )
        self._program.reshards[reshard] = list(self._new_nodes)

    def _lower_op_node(self, op_node: OpNode) -> None:
        if op_node.op is SYM_SIZE:
            self._lower_size(op_node)
        else:
            self._map_result(op_node.result, self._lower_op(op_node))

    def _lower_size(self, op_node: OpNode) -> None:
        """The size of the full tensor, computed from the shard's size if that dim is sharded."""
        (value,) = op_node.outputs
        self._nodes[value] = self._sizes.find(value.scalar)

    def _lower_op(self, op_node: OpNode) -> Any:
        is_replicated = all(
            _is_replicated(value.placements) for value in (*op_node.inputs, *op_node.outputs)
        )
        lowering = (
            find_lowering(op_node.op) if is_overload(op_node.op) and not is_replicated else None
        )
        arguments = self._arguments(op_node)
        if lowering is not None:
            return lowering(self._lowering_context(op_node, arguments))
        if is_overload(op_node.op):
            return self.write(op_node.op, **arguments)
        return self.write(op_node.op, *arguments.values())

    def _arguments(self, op_node: OpNode) -> dict[str, Any]:
        positions = iter(range(len(op_node.inputs)))

        def find(item: object) -> object:
            if isinstance(item, Value) and item.is_tensor:
                return self._allreduce_grad(
                    item, self._grad_reductions.axes_to_reduce(op_node, next(positions))
                )
            return self._local(item)

        arguments: dict[str, Any] = map_nest(op_node.arguments, find)
        return arguments

    def _allreduce_grad(self, value: Value, axes: tuple[int, ...]) -> fx.Node:
        """The node of a replicated value whose gradient is all-reduced over these axes."""
        node = self._nodes[value]
        assert isinstance(node, fx.Node)
        for axis in axes:
            if (value, axes) in self._grad_reduced:
                return self._grad_reduced[value, axes]
            node = self._emitter.allreduce_grad(node, axis=axis)
        if axes:
            self._grad_reduced[value, axes] = node
        return node

    def _lowering_context(self, op_node: OpNode, arguments: dict[str, Any]) -> LoweringContext:
        inputs = op_node.inputs
        call = describe_call(
            op_node,
            num_axes=0,
            coordinate=self._coordinate,
            num_ranks=self._coordinate.sizes[0],
            input_placements=tuple(value.placements[0] for value in inputs),
            is_training=False,
        )
        outputs = [output for output in op_node.outputs if output.is_tensor]
        return LoweringContext(
            call=call,
            arguments=arguments,
            inputs=tuple(value.spec for value in inputs),
            outputs=tuple(output.spec for output in outputs),
            coordinate=self._coordinate,
            builder=self,
        )

    def _map_result(self, result: Any, node: Any) -> None:
        """Map the values of an op's result to the nodes that compute them."""
        if isinstance(result, Value):
            self._nodes[result] = node
            if not isinstance(node, fx.Node):
                return
            if not result.is_tensor:
                self._sizes.add_node(node, result.scalar)
            elif not all(isinstance(size, int) for size in result.shape):
                # The data may have decided a size that no input has.
                self._sizes.add_shape(node, result.spec.local_shape(self._coordinate))
        elif isinstance(result, list):
            for index, part in enumerate(result):
                if part is not None:
                    is_list = isinstance(node, (list, tuple))
                    item = node[index] if is_list else self.item(node, index)
                    self._map_result(part, item)

    def _local(self, item: Any) -> Argument:
        if isinstance(item, Attribute):
            self._program.attributes[item.name] = item.value
            return self._fx_graph.get_attr(item.name)
        return self._nodes[item] if isinstance(item, Value) else item


def _node_name(op: Callable[..., object]) -> str:
    """A node's name as torch.export chooses it: the op without its overload."""
    return str(op_packet(op).__name__ if is_overload(op) else op.__name__)


def _is_replicated(placements: list[Placement]) -> bool:
    return ShardSpec((), tuple(placements)).is_replicated


def _positional_arguments(
    op: OpOverload, args: Sequence[Argument], kwargs: dict[str, Argument]
) -> tuple[tuple[Argument, ...], dict[str, Argument]]:
    """Arguments by position, without trailing defaults; keyword-only ones by name."""
    schema = op_schema(op).arguments
    named = {argument.name: value for argument, value in zip(schema, args, strict=False)} | kwargs
    positional = [argument for argument in schema if not argument.kwarg_only]
    values = [named.get(argument.name, argument.default_value) for argument in positional]
    while values and _is_default(positional[len(values) - 1], values[-1]):
        values.pop()
    keywords = {
        argument.name: named[argument.name]
        for argument in schema
        if argument.kwarg_only
        and argument.name in named
        and not _is_default(argument, named[argument.name])
    }
    return tuple(values), keywords


def _is_default(argument: torch.Argument, value: object) -> bool:
    if not argument.has_default_value() or isinstance(value, fx.Node):
        return False
    return type(value) is type(argument.default_value) and value == argument.default_value
