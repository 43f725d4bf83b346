"""A graph as a Python function: its ops, bound once, and nothing between them."""

from __future__ import annotations

import itertools
import linecache
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

from torch import Tensor, fx

from shardscope.parallel.running.python_calls import python_call

__all__ = ["RankFunction", "write_function"]

_numbers = itertools.count()


@final
@dataclass(frozen=True, eq=False)
class RankFunction:
    """`run(state, inputs)` returns the graph's results in order.

    After the values of the graph's own inputs that are state, `state` has `attributes`: tensors
    that hang on the graph.
    """

    run: Callable[[Sequence[Any], Sequence[Any]], Sequence[Any]]
    attributes: Mapping[str, Tensor]
    source: str


def write_function(graph_module: fx.GraphModule, *, is_input: Sequence[bool]) -> RankFunction:
    """The function of a graph; `is_input` says which of its placeholders are inputs, not state."""
    return _Writer(graph_module, is_input).write()


@final
class _Writer:
    def __init__(self, graph_module: fx.GraphModule, is_input: Sequence[bool]) -> None:
        self._graph_module = graph_module
        self._nodes = list(graph_module.graph.nodes)
        self._is_input = is_input
        self._taken = {node.name for node in self._nodes} | {"state", "inputs"}
        self._bound: dict[str, Any] = {}
        self._names: dict[int, str] = {}  # by the identity of what is bound
        read = [node for node in self._nodes if node.op == "get_attr"]
        things = {str(node.target): self._thing(node) for node in read}
        self._tensors = {name: one for name, one in things.items() if isinstance(one, Tensor)}
        self._attributes = {str(node.target): str(node.name) for node in read}

    def write(self) -> RankFunction:
        ends = _last_uses(self._nodes)
        lines = self._head()
        for node in self._nodes:
            if node.op == "call_function":
                lines.append(f"{node.name} = {self._call(node)}")
            elif node.op == "output":
                lines.append(f"return {self._spell(node.args[0])}")
            done = [one.name for one in ends.get(node, ())]
            if done:
                lines.append(f"del {', '.join(done)}")
        source = "def run(state, inputs):\n" + "".join(f"    {line}\n" for line in lines)
        return RankFunction(_define(source, self._bound), self._tensors, source)

    def _head(self) -> list[str]:
        placeholders = [node.name for node in self._nodes if node.op == "placeholder"]
        roles = list(zip(placeholders, self._is_input, strict=True))
        state = [name for name, is_input in roles if not is_input]
        state += [self._attributes[name] for name in self._tensors]
        inputs = [name for name, is_input in roles if is_input]
        unpacked = [("state", state), ("inputs", inputs)]
        return [f"{', '.join(names)}, = {whole}" for whole, names in unpacked if names]

    def _call(self, node: fx.Node) -> str:
        if node.target is operator.getitem:
            return f"{self._spell(node.args[0])}[{self._spell(node.args[1])}]"
        function = self._bind(python_call(node.target), str(node.target))
        given = [self._spell(one) for one in node.args]
        given += [f"{name}={self._spell(one)}" for name, one in node.kwargs.items()]
        return f"{function}({', '.join(given)})"

    def _spell(self, item: Any) -> str:
        """An argument as Python writes it; what has no spelling is bound to a name."""
        match item:
            case fx.Node():
                return self._spell_node(item)
            case tuple():
                return f"({''.join(self._spell(one) + ', ' for one in item)})"
            case list():
                return f"[{', '.join(self._spell(one) for one in item)}]"
            case slice():
                parts = (item.start, item.stop, item.step)
                return f"slice({', '.join(self._spell(one) for one in parts)})"
            case dict():
                pairs = (f"{self._spell(key)}: {self._spell(one)}" for key, one in item.items())
                return f"{{{', '.join(pairs)}}}"
        if _has_spelling(item):
            return repr(item)
        return self._bind(item, "constant")

    def _spell_node(self, node: fx.Node) -> str:
        if node.op != "get_attr":
            return node.name
        if str(node.target) in self._tensors:
            return self._attributes[str(node.target)]
        return self._bind(self._thing(node), str(node.target))

    def _thing(self, node: fx.Node) -> Any:
        return operator.attrgetter(str(node.target))(self._graph_module)

    def _bind(self, thing: Any, label: str) -> str:
        if id(thing) not in self._names:
            plain = "".join(one if one.isalnum() else "_" for one in label)
            name = f"_{plain}"
            while name in self._taken:
                name += "_"
            self._taken.add(name)
            self._names[id(thing)] = name
            self._bound[name] = thing
        return self._names[id(thing)]


def _has_spelling(item: Any) -> bool:
    if isinstance(item, float):
        return type(item) is float and math.isfinite(item)
    return item is None or type(item) in (bool, int, str)


def _last_uses(nodes: Sequence[fx.Node]) -> dict[fx.Node, list[fx.Node]]:
    """By node, the computed values that nothing after it uses: memory is free from there on."""
    last: dict[fx.Node, fx.Node] = {}
    for node in nodes:
        if node.op == "call_function":
            last[node] = node
        last.update((used, node) for used in node.all_input_nodes if used in last)
    ends: dict[fx.Node, list[fx.Node]] = {}
    for value, user in last.items():
        if user.op != "output":
            ends.setdefault(user, []).append(value)
    return ends


def _define(source: str, bound: Mapping[str, Any]) -> Callable[..., Any]:
    name = f"<rank program {next(_numbers)}>"
    # Where a traceback looks for lines of code.
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    scope = dict(bound)
    exec(compile(source, name, "exec"), scope)
    run: Callable[..., Any] = scope["run"]
    return run
