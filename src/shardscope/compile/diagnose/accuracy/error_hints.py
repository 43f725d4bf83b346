"""Names of ops that an error or a deviation points at; the search tries them first."""

from __future__ import annotations

import linecache
import re
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import FrameType
from typing import Any

from torch import fx

from shardscope.compile.diagnose.accuracy.check_result import message_of
from shardscope.compile.diagnose.subgraph.subgraph import Subgraph

_NODE = re.compile(r"%(\w+) : ")  # how fx prints the node that it was executing
_RESULT = re.compile(r"\s*(\w+) = ")  # a line of the code that fx generates for a graph
_GENERATED = "<eval_with_key>"
_OUTPUT = re.compile(r"output (\d+)")


def find_hints(error: BaseException) -> tuple[str, ...]:
    """Names of nodes that an error mentions, or in whose line it was raised."""
    named = _NODE.findall(message_of(error))
    raised = [
        name for frame, line in traceback.walk_tb(error.__traceback__) for name in _at(frame, line)
    ]
    return tuple(dict.fromkeys([*named, *reversed(raised)]))


def _at(frame: FrameType, line: int) -> Iterator[str]:
    """The node whose line of generated code is executed, if any, and the nodes it came from."""
    file = frame.f_code.co_filename
    match = file.startswith(_GENERATED) and _RESULT.match(linecache.getline(file, line))
    if not match:
        return
    yield match[1]
    graph = frame.f_locals.get("self")
    if isinstance(graph, fx.GraphModule):
        for node in graph.graph.nodes:
            if node.name == match[1]:
                yield from _list_origins(node.meta.get("from_node") or ())


def _list_origins(sources: Sequence[Any]) -> Iterator[str]:
    """Names in earlier graphs, the earliest last."""
    for source in sources:
        yield source.name
        yield from _list_origins(source.from_node)


def in_order(subgraph: Subgraph) -> Subgraph:
    """The same subgraph with its outputs in the order in which they are computed."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in subgraph.graph.graph.nodes:
        if node.op != "output":
            copies[node] = graph.node_copy(node, copies.__getitem__)
    (last,) = subgraph.graph.graph.find_nodes(op="output")
    output_nodes = set(last.all_input_nodes)
    graph.output(tuple(copies[node] for node in copies if node in output_nodes))
    return replace(subgraph, graph=fx.GraphModule(subgraph.graph, graph))


def name_output(subgraph: Subgraph, output: str) -> str:
    """The name of the node that returns `output 3`; empty if there is no such output."""
    match = _OUTPUT.fullmatch(output)
    (last,) = subgraph.graph.graph.find_nodes(op="output")
    return str(last.args[0][int(match[1])].name) if match else ""
