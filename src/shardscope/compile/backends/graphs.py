"""Copies of graphs that may be changed: the caller's own stays as it is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import fx

__all__ = ["copy_graph", "graphs_in", "user_line", "values_of"]


def copy_graph(gm: fx.GraphModule) -> fx.GraphModule:
    """A plain GraphModule that computes what `gm` does, with its very parameters and buffers.

    Dynamo's own is of a lazy class that TorchScript cannot read. Graphs in the graph, as a branch
    of `torch.cond` is one, are copied too.
    """
    graph = fx.Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    copy = fx.GraphModule(gm, graph)
    for name, inner in list(gm.named_children()):
        if isinstance(inner, fx.GraphModule) and hasattr(copy, name):
            setattr(copy, name, copy_graph(inner))
    return copy


def graphs_in(gm: fx.GraphModule) -> Iterator[fx.GraphModule]:
    """`gm`, then the graphs in it."""
    for module in gm.modules():
        if isinstance(module, fx.GraphModule):
            yield module


def values_of(node: fx.Node) -> list[Any] | None:
    """What `node` returned when it was traced, one value or several; None if that is not known."""
    for key in ("example_value", "val"):
        if key in node.meta:
            value = node.meta[key]
            return list(value) if isinstance(value, list | tuple) else [value]
    return None


def user_line(node: fx.Node) -> str:
    """The innermost line of the user's that `node` comes from, as `file:line`; may be empty."""
    trace = [line.strip() for line in (node.stack_trace or "").splitlines()]
    files = [line for line in trace if line.startswith('File "')]
    if not files:
        return ""
    _, file, rest = files[-1].split('"', 2)
    return f"{file}:{rest.removeprefix(', line ').split(',')[0]}"
