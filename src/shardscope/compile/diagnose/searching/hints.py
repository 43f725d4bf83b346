"""Ops that an error or a deviation points at: the search tries them first."""

from __future__ import annotations

import linecache
import re
import traceback

from torch import fx

from shardscope.compile.diagnose.fragment import Fragment
from shardscope.compile.diagnose.outcome import Outcome, message_of

__all__ = ["find_hints", "in_order", "name_output"]

_NODE = re.compile(r"%(\w+) : ")  # as fx prints a node that it was executing
_RESULT = re.compile(r"\s*(\w+) = ")  # a line of the code that fx makes of a graph
_GENERATED = "<eval_with_key>"
_OUTPUT = re.compile(r"output (\d+)")


def find_hints(error: BaseException) -> tuple[str, ...]:
    """Names of nodes that an error mentions, or in whose line it was raised."""
    named = _NODE.findall(message_of(error))
    frames = traceback.extract_tb(error.__traceback__)
    lines = [
        linecache.getline(frame.filename, frame.lineno or 0)
        for frame in frames
        if frame.filename.startswith(_GENERATED)
    ]
    results = [found[1] for line in lines if (found := _RESULT.match(line))]
    return tuple(dict.fromkeys([*named, *reversed(results)]))


def in_order(fragment: Fragment) -> Fragment:
    """The same fragment with its outputs in the order in which they are made."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in fragment.graph.graph.nodes:
        if node.op != "output":
            copies[node] = graph.node_copy(node, copies.__getitem__)
    (last,) = fragment.graph.graph.find_nodes(op="output")
    made = set(last.all_input_nodes)
    graph.output(tuple(copies[node] for node in copies if node in made))
    return Fragment(fx.GraphModule(fragment.graph, graph), fragment.inputs, fragment.with_gradients)


def name_output(fragment: Fragment, outcome: Outcome) -> str:
    """The node whose value is off, if it is that of an output."""
    found = _OUTPUT.fullmatch(outcome.deviation.tensor) if outcome.deviation else None
    (last,) = fragment.graph.graph.find_nodes(op="output")
    return str(last.args[0][int(found[1])].name) if found else ""
