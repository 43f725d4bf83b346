"""Reads the ops of a graph before the backend changes it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from shardscope._torch.collectives.functional import (
    find_group,
    inner_graphs,
    is_bookkeeping,
    is_collective_name,
    name_target,
)
from shardscope._torch.dispatch import is_higher_order
from shardscope.record import OpKind

_KINDS = {
    "call_function": OpKind.FUNCTION,
    "call_method": OpKind.METHOD,
    "call_module": OpKind.MODULE,
}


@dataclass(frozen=True, slots=True)
class RawOp:
    """An op of a graph, with the stack trace of its line."""

    kind: OpKind
    op: str
    result: str
    module: str
    within: str
    stack_trace: str
    group: tuple[int, ...] | None  # ranks, if it is a collective


@dataclass(frozen=True, slots=True)
class RawGraph:
    """A graph of dynamo, with its ops."""

    compile_id: str
    num_inputs: int
    num_outputs: int
    is_broken: bool
    reason: str
    ops: tuple[RawOp, ...]


def read_graph(graph: fx.GraphModule, compile_id: str) -> RawGraph:
    """Read the ops, inputs and end of a graph that dynamo made."""
    why = getattr(graph, "compile_subgraph_reason", None)
    nodes = graph.graph.nodes
    (output,) = (node for node in nodes if node.op == "output")
    return RawGraph(
        compile_id=compile_id,
        num_inputs=sum(node.op == "placeholder" for node in nodes),
        num_outputs=len(output.args[0]),
        is_broken=bool(getattr(why, "graph_break", False)),
        reason=str(getattr(why, "reason", "")),
        ops=tuple(_read_ops(graph, "")),
    )


def list_targets(graph: fx.GraphModule) -> list[Any]:
    """The targets of all nodes of a graph and its subgraphs, except bookkeeping."""
    targets: list[Any] = []
    for node in graph.graph.nodes:
        if node.op in _KINDS:
            targets += [node.target] if _kind_of(node) is not OpKind.BOOKKEEPING else []
            targets += [target for _, inner in inner_graphs(node) for target in list_targets(inner)]
    return targets


def _read_ops(graph: fx.GraphModule, within: str) -> Iterator[RawOp]:
    for node in graph.graph.nodes:
        if node.op not in _KINDS:
            continue
        op = _read_op(node, within)
        yield op
        for name, inner in inner_graphs(node):
            inner_name = f"{node.name}.{name}"
            yield from _read_ops(inner, f"{within}/{inner_name}" if within else inner_name)


def _read_op(node: fx.Node, within: str) -> RawOp:
    name = name_target(node)
    return RawOp(
        kind=_kind_of(node),
        op=name,
        result=_describe(node.meta.get("example_value")),
        module=module_of(node),
        within=within,
        stack_trace=node.meta.get("stack_trace") or "",
        group=find_group(node) if is_collective_name(name) else None,
    )


def _kind_of(node: fx.Node) -> OpKind:
    if is_higher_order(node.target):
        return OpKind.HIGHER_ORDER
    return OpKind.BOOKKEEPING if is_bookkeeping(node) else _KINDS[node.op]


def _describe(value: Any) -> str:
    """The dtype and shape of a value, as `float32[8, ?]`; `?` is a dynamic size."""
    if isinstance(value, torch.Tensor):
        sizes = ", ".join(str(size) if isinstance(size, int) else "?" for size in value.shape)
        return f"{str(value.dtype).removeprefix('torch.')}[{sizes}]"
    if isinstance(value, tuple | list):
        return f"({', '.join(_describe(item) for item in value)})"
    return "" if value is None else type(value).__name__


def module_of(node: fx.Node) -> str:
    """The name of the module that a node belongs to; "" for none or the compiled module."""
    stack = node.meta.get("nn_module_stack") or {}
    name = str(next(reversed(stack.values()))[0]) if stack else ""
    return _clean(name)


def _clean(name: str) -> str:
    """A module name from dynamo's: `layers.0.up` for `L['self'].layers[0].up`."""
    name = name.removeprefix("L['self']").removeprefix("L['fn']").replace("._modules", "")
    name = name.removeprefix("L").removeprefix("G") if name.startswith(("L['", "G['")) else name
    for old, new in (("['", "."), ("']", ""), ("[", "."), ("]", "")):
        name = name.replace(old, new)
    return name.removeprefix(".")
