"""Decomposes an op into ops that can be sharded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, final

import torch
from torch import fx
from torch.export import default_decompositions
from torch.fx.experimental.proxy_tensor import make_fx

from shardscope._torch.dispatch import is_overload, op_schema
from shardscope.parallel.ir.graph import OpNode, Value, map_nest, values_in
from shardscope.parallel.ir.symbolic_sizes import SymbolicSizes
from shardscope.parallel.passes.from_export import lower_op, name_arguments, read_result
from shardscope.parallel.sharding_rules.registry import find_decomposition


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
    graph, inputs = _trace(function, op_node)
    if graph is None or _is_unchanged(graph, op_node.op):
        return None
    return _read_graph(graph, inputs, op_node, sizes, is_ours=ours is not None)


def _torch_decomposition(op: Any) -> Callable[..., Any] | None:
    if not is_overload(op):
        return None
    function: Callable[..., Any] | None = default_decompositions().get(op)
    return function


def _trace(function: Callable[..., Any], op_node: OpNode) -> tuple[fx.Graph | None, list[Value]]:
    """The graph of the function on the node's arguments, and the values of its placeholders."""
    inputs = list(
        dict.fromkeys(value for value in values_in(op_node.arguments) if _is_traced(value))
    )
    examples = [value.example for value in inputs]

    def call(*values: Any) -> Any:
        values_by_input = dict(zip(inputs, values, strict=True))
        arguments = map_nest(op_node.arguments, lambda item: _substitute(item, values_by_input))
        return function(*arguments.values()) if _is_positional(op_node) else function(**arguments)

    try:
        return make_fx(call, pre_dispatch=True)(*examples).graph, inputs
    except NotImplementedError:
        return None, inputs


def _is_traced(value: Value) -> bool:
    return value.is_tensor or isinstance(value.example, torch.SymInt)


def _substitute(item: Any, values_by_input: dict[Value, Any]) -> Any:
    if not isinstance(item, Value):
        return item
    return values_by_input.get(item, item.example)


def _is_positional(op_node: OpNode) -> bool:
    return not any(argument.kwarg_only for argument in op_schema(op_node.op).arguments)


def _is_unchanged(graph: fx.Graph, op: Any) -> bool:
    return [node.target for node in graph.nodes if node.op == "call_function"] == [op]


def _read_graph(
    graph: fx.Graph, inputs: list[Value], op_node: OpNode, sizes: SymbolicSizes, *, is_ours: bool
) -> Decomposition:
    known: dict[fx.Node, Any] = {}
    op_nodes: list[OpNode] = []
    placeholder_values = iter(inputs)
    result: Any = None
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


def _value_of(item: Any, known: dict[fx.Node, Any]) -> Any:
    return known[item] if isinstance(item, fx.Node) else item


def _match_results(old: Any, new: Any) -> dict[Value, Value]:
    """By old result, the new value that replaces it."""
    pairs = list(zip(values_in(old), values_in(new), strict=True))
    for old_value, new_value in pairs:
        if new_value.origin is None and not new_value.placements:
            new_value.origin = old_value.root
    return dict(pairs)
