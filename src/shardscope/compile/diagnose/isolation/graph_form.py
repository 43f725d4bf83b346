"""Graphs as plain data: nodes with their names, targets and arguments, and what they refer to."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import fx

from shardscope.errors import CompileError

__all__ = ["GraphForm", "NodeForm", "build_graph", "describe_graph", "settle"]

_PLAIN_META = ("custom", "stack_trace")


@final
@dataclass(frozen=True)
class NodeForm:
    """A node; arguments name others by `_Reference`."""

    name: str
    op: str
    target: Any
    args: Any
    kwargs: Any
    meta: dict[str, Any]


@final
@dataclass(frozen=True)
class GraphForm:
    """The nodes in their order, and the tensors, constants and graphs that they look up."""

    nodes: tuple[NodeForm, ...]
    held: dict[str, Any]  # by the targets of get_attr and call_module
    name: str


@final
@dataclass(frozen=True)
class _Reference:
    name: str


def describe_graph(graph: fx.GraphModule, *, seen: dict[int, GraphForm] | None = None) -> GraphForm:
    """A graph and those inside it; one that is met twice is the same object."""
    seen = {} if seen is None else seen
    if id(graph) in seen:
        return seen[id(graph)]
    held = {
        name: describe_graph(value, seen=seen) if isinstance(value, fx.GraphModule) else value
        for name, value in _find_held(graph)
    }
    nodes = tuple(_describe_node(node) for node in graph.graph.nodes)
    seen[id(graph)] = GraphForm(nodes, held, type(graph).__name__)
    return seen[id(graph)]


def build_graph(
    form: GraphForm, *, seen: dict[int, fx.GraphModule] | None = None
) -> fx.GraphModule:
    """The graph that was described."""
    seen = {} if seen is None else seen
    if id(form) in seen:
        return seen[id(form)]
    held = {
        name: build_graph(value, seen=seen) if isinstance(value, GraphForm) else value
        for name, value in form.held.items()
    }
    graph = fx.Graph()
    nodes: dict[str, fx.Node] = {}
    for node in form.nodes:
        nodes[node.name] = _build_node(graph, node, nodes)
    seen[id(form)] = fx.GraphModule(held, graph, class_name=form.name)
    return seen[id(form)]


def _find_held(graph: fx.GraphModule) -> Iterator[tuple[str, Any]]:
    for node in graph.graph.nodes:
        if node.op in ("get_attr", "call_module"):
            value: Any = graph
            for part in node.target.split("."):
                value = getattr(value, part)
            yield node.target, value


def _describe_node(node: fx.Node) -> NodeForm:
    if "triton_kernel_wrapper" in str(node.target):
        raise CompileError(
            f"the graph calls a Triton kernel of yours ({node.name}), which no other process has. "
            f"Wrap it with torch.library.custom_op and define that in a module."
        )
    args = _map(node.args, _refer)
    kwargs = _map(node.kwargs, _refer)
    return NodeForm(node.name, node.op, node.target, args, kwargs, _describe_meta(node.meta))


def _build_node(graph: fx.Graph, form: NodeForm, nodes: Mapping[str, fx.Node]) -> fx.Node:
    def resolve(value: Any) -> Any:
        return nodes[value.name] if isinstance(value, _Reference) else value

    args, kwargs = _map(form.args, resolve), _map(form.kwargs, resolve)
    node = graph.create_node(form.op, form.target, args, kwargs, name=form.name)
    assert node.name == form.name, f"{form.name} became {node.name}"
    node.meta.update(form.meta)
    return node


def _refer(value: Any) -> Any:
    if isinstance(value, fx.Node):
        return _Reference(value.name)
    return settle(value)


def settle(value: Any) -> Any:
    """The number that a symbol stands for in this run; anything else as it is."""
    if isinstance(value, torch.SymBool):
        return bool(value)
    if isinstance(value, torch.SymFloat):
        return float(value)
    if not isinstance(value, torch.SymInt):
        return value
    if value.node.is_nested_int():
        raise CompileError(
            "the graph takes the size of a nested tensor, which is not a number. Call the function "
            "with dense tensors to have its ops looked at one by one."
        )
    return int(value)


def _map(value: Any, change: Callable[[Any], Any]) -> Any:
    """An argument of a node with everything in it changed; containers become plain ones."""
    if isinstance(value, slice):
        parts = (value.start, value.stop, value.step)
        return slice(*(_map(part, change) for part in parts))
    if isinstance(value, dict):
        return {key: _map(one, change) for key, one in value.items()}
    if isinstance(value, torch.Size):
        return torch.Size(_map(tuple(value), change))
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_map(one, change) for one in value))
    if isinstance(value, tuple):
        return tuple(_map(one, change) for one in value)
    if isinstance(value, list):
        return [_map(one, change) for one in value]
    return change(value)


def _describe_meta(meta: Mapping[str, Any]) -> dict[str, Any]:
    """What is known of a node's origin; classes and functions by name, values not at all."""
    kept = {name: meta[name] for name in _PLAIN_META if name in meta}
    if "nn_module_stack" in meta:
        stack = meta["nn_module_stack"].items()
        kept["nn_module_stack"] = {key: (path, _name(cls)) for key, (path, cls) in stack}
    if "source_fn_stack" in meta:
        kept["source_fn_stack"] = [
            (name, _name(source)) for name, source in meta["source_fn_stack"]
        ]
    return kept


def _name(value: Any) -> str:
    if isinstance(value, str):
        return value
    name = getattr(value, "__qualname__", None) or getattr(value, "__name__", None)
    module = getattr(value, "__module__", None)
    return f"{module}.{name}" if name and module else name or type(value).__name__
