"""Graphs and their inputs as data that can be pickled."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import fx

from shardscope._torch.fake import is_fake
from shardscope.compile.diagnose.subgraph import Subgraph
from shardscope.errors import CompileError

_PLAIN_META = ("custom", "stack_trace")


@final
@dataclass(frozen=True)
class NodeData:
    """A node; its arguments refer to other nodes by `_Reference`."""

    name: str
    op: str
    target: Any
    args: Any
    kwargs: Any
    meta: dict[str, Any]


@final
@dataclass(frozen=True)
class GraphData:
    """The nodes in order, and the tensors, constants and graphs that they refer to by name."""

    nodes: tuple[NodeData, ...]
    attributes: dict[str, Any]  # by the targets of get_attr and call_module
    name: str


@final
@dataclass(frozen=True)
class _Reference:
    name: str


def describe_graph(graph: fx.GraphModule, *, memo: dict[int, GraphData] | None = None) -> GraphData:
    """A graph and the graphs inside it as data; the same graph becomes the same object."""
    memo = {} if memo is None else memo
    if id(graph) in memo:
        return memo[id(graph)]
    attributes = {
        name: describe_graph(value, memo=memo) if isinstance(value, fx.GraphModule) else value
        for name, value in _find_attributes(graph)
    }
    nodes = tuple(_describe_node(node) for node in graph.graph.nodes)
    memo[id(graph)] = GraphData(nodes, attributes, type(graph).__name__)
    return memo[id(graph)]


def build_graph(
    data: GraphData, *, memo: dict[int, fx.GraphModule] | None = None
) -> fx.GraphModule:
    """Build the graph from its data."""
    memo = {} if memo is None else memo
    if id(data) in memo:
        return memo[id(data)]
    attributes = {
        name: build_graph(value, memo=memo) if isinstance(value, GraphData) else value
        for name, value in data.attributes.items()
    }
    graph = fx.Graph()
    nodes: dict[str, fx.Node] = {}
    for node in data.nodes:
        nodes[node.name] = _build_node(graph, node, nodes)
    memo[id(data)] = fx.GraphModule(attributes, graph, class_name=data.name)
    return memo[id(data)]


def _find_attributes(graph: fx.GraphModule) -> Iterator[tuple[str, Any]]:
    for node in graph.graph.nodes:
        if node.op in ("get_attr", "call_module"):
            value: Any = graph
            for part in node.target.split("."):
                value = getattr(value, part)
            yield node.target, value


def _describe_node(node: fx.Node) -> NodeData:
    if "triton_kernel_wrapper" in str(node.target):
        raise CompileError(
            f"the graph calls a Triton kernel ({node.name}) that the worker process cannot import. "
            f"Wrap it with torch.library.custom_op, in a module."
        )
    args = _map(node.args, _refer)
    kwargs = _map(node.kwargs, _refer)
    return NodeData(node.name, node.op, node.target, args, kwargs, _describe_origin(node.meta))


def _build_node(graph: fx.Graph, data: NodeData, nodes: Mapping[str, fx.Node]) -> fx.Node:
    def resolve(value: Any) -> Any:
        return nodes[value.name] if isinstance(value, _Reference) else value

    args, kwargs = _map(data.args, resolve), _map(data.kwargs, resolve)
    node = graph.create_node(data.op, data.target, args, kwargs, name=data.name)
    assert node.name == data.name, f"{data.name} became {node.name}"
    node.meta.update(data.meta)
    return node


def _refer(value: Any) -> Any:
    if isinstance(value, fx.Node):
        return _Reference(value.name)
    return concretize(value)


def concretize(value: Any) -> Any:
    """The value of a symbolic number in this run; any other value unchanged."""
    if isinstance(value, torch.SymBool):
        return bool(value)
    if isinstance(value, torch.SymFloat):
        return float(value)
    if not isinstance(value, torch.SymInt):
        return value
    if value.node.is_nested_int():
        raise CompileError(
            "the graph takes the size of a nested tensor, which is not a number. Call the function "
            "with dense tensors to have its ops compared one by one."
        )
    return int(value)


def _map(value: Any, change: Callable[[Any], Any]) -> Any:
    """An argument of a node with `change` applied to every leaf; containers become plain ones."""
    if isinstance(value, slice):
        parts = (value.start, value.stop, value.step)
        return slice(*(_map(part, change) for part in parts))
    if isinstance(value, dict):
        return {key: _map(item, change) for key, item in value.items()}
    if isinstance(value, torch.Size):
        return torch.Size(_map(tuple(value), change))
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_map(item, change) for item in value))
    if isinstance(value, tuple):
        return tuple(_map(item, change) for item in value)
    if isinstance(value, list):
        return [_map(item, change) for item in value]
    return change(value)


def _describe_origin(meta: Mapping[str, Any]) -> dict[str, Any]:
    """The metadata on a node's origin, with classes and functions by name."""
    origin = {name: meta[name] for name in _PLAIN_META if name in meta}
    if "nn_module_stack" in meta:
        stack = meta["nn_module_stack"].items()
        origin["nn_module_stack"] = {key: (path, _name(cls)) for key, (path, cls) in stack}
    if "source_fn_stack" in meta:
        origin["source_fn_stack"] = [
            (name, _name(source)) for name, source in meta["source_fn_stack"]
        ]
    return origin


def _name(value: Any) -> str:
    if isinstance(value, str):
        return value
    name = getattr(value, "__qualname__", None) or getattr(value, "__name__", None)
    module = getattr(value, "__module__", None)
    return f"{module}.{name}" if name and module else name or type(value).__name__


@final
@dataclass(frozen=True)
class SubgraphData:
    """A subgraph as data that can be pickled."""

    graph: GraphData
    inputs: tuple[Any, ...]
    with_gradients: bool
    has_symbolic_sizes: bool


def describe_subgraph(subgraph: Subgraph) -> SubgraphData:
    """A subgraph as data; raises CompileError if a tensor of it has no data."""
    data = describe_graph(subgraph.graph)
    names = (node.name for node in data.nodes if node.op == "placeholder")
    for name, value in (*zip(names, subgraph.inputs, strict=True), *_walk_attributes(data)):
        if isinstance(value, torch.Tensor) and (lack := _find_lack(value)):
            raise CompileError(
                f"'{name}' of the graph has no data ({lack}), so nothing can be computed with it. "
                f"Call the function with tensors that have data."
            )
    inputs = tuple(concretize(value) for value in subgraph.inputs)
    return SubgraphData(data, inputs, subgraph.with_gradients, subgraph.has_symbolic_sizes)


def build_subgraph(data: SubgraphData) -> Subgraph:
    """Build the subgraph from its data."""
    graph = build_graph(data.graph)
    return Subgraph(graph, data.inputs, data.with_gradients, data.has_symbolic_sizes)


def _walk_attributes(data: GraphData) -> Iterator[tuple[str, Any]]:
    for name, value in data.attributes.items():
        if isinstance(value, GraphData):
            yield from _walk_attributes(value)
        else:
            yield name, value


def _find_lack(tensor: torch.Tensor) -> str:
    """Why a tensor has no data; empty if it has data."""
    if is_fake(tensor):
        return "it is fake"
    if tensor.is_meta:
        return "it is on the meta device"
    is_plain = type(tensor) in (torch.Tensor, torch.nn.Parameter)
    if is_plain and tensor.layout is torch.strided and tensor.numel():
        return "" if tensor.untyped_storage().nbytes() else "its memory has been freed"
    return ""
