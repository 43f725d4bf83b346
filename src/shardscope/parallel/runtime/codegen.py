"""Generates a Python function from an FX graph, calling torch functions that are fast to call."""

from __future__ import annotations

import itertools
import linecache
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, fx
from torch.nn import functional

from shardscope._torch.dispatch import is_overload, op_schema

_SAME_NAME = """
    abs add.Tensor addmm all.dim amax any.dim argmax baddbmm bitwise_and.Tensor bitwise_not
    bitwise_or.Tensor bmm cat clamp clamp_min clone cos cumsum div.Tensor embedding eq.Scalar
    eq.Tensor erf exp flip ge.Scalar ge.Tensor gt.Scalar gt.Tensor index_select layer_norm le.Scalar
    le.Tensor log logical_and logical_not logical_or logsumexp.default lt.Scalar lt.Tensor matmul
    masked_fill.Scalar masked_fill.Tensor maximum mean.dim minimum mm mul.Tensor native_layer_norm
    ne.Scalar ne.Tensor neg permute pow.Tensor_Scalar reciprocal relu reshape rms_norm rsqrt
    rsub.Scalar select.int sigmoid sin softmax.int sqrt squeeze.dim stack sub.Tensor sum
    sum.dim_IntList t tanh transpose.int tril triu unsqueeze var.dim where.self
"""
_METHODS = "contiguous expand masked_fill_.Scalar repeat to.dtype type_as view"


def _find_calls() -> dict[str, Callable[..., Any]]:
    calls = {_full_name(name): getattr(torch, _packet(name)) for name in _SAME_NAME.split()}
    calls |= {_full_name(name): getattr(Tensor, _packet(name)) for name in _METHODS.split()}
    return calls | {
        "gelu.default": functional.gelu,
        "linear.default": functional.linear,
        "scaled_dot_product_attention.default": functional.scaled_dot_product_attention,
        "silu.default": functional.silu,
    }


def _full_name(name: str) -> str:
    return name if "." in name else f"{name}.default"


def _packet(name: str) -> str:
    return name.split(".")[0]


PYTHON_CALLS: Mapping[str, Callable[..., Any]] = _find_calls()
"""By the name of an overload of ATen's."""


def python_call(op: Any) -> Callable[..., Any]:
    """The function to call for `op`: itself, or an equivalent one with less overhead."""
    if not is_overload(op):
        call: Callable[..., Any] = op
        return call
    schema = op_schema(op)
    namespace, _, name = schema.name.partition("::")
    if namespace != "aten":
        return op
    return PYTHON_CALLS.get(f"{name}.{schema.overload_name or 'default'}", op)


_numbers = itertools.count()


@final
@dataclass(frozen=True, eq=False)
class RankFunction:
    """`run(state, inputs)` returns the graph's results in order.

    `state` has the graph's inputs that are state, then `attributes`, the tensor attributes of the
    graph module.
    """

    run: Callable[[Sequence[Any], Sequence[Any]], Sequence[Any]]
    attributes: Mapping[str, Tensor]
    source: str


def write_function(graph_module: fx.GraphModule, *, is_input: Sequence[bool]) -> RankFunction:
    """The function of a graph; `is_input`: whether each placeholder is an input, not state."""
    return _FunctionWriter(graph_module, is_input).write()


@final
class _FunctionWriter:
    """Writes the source of a graph's function, and collects the objects that it refers to."""

    def __init__(self, graph_module: fx.GraphModule, is_input: Sequence[bool]) -> None:
        self._graph_module = graph_module
        self._nodes = list(graph_module.graph.nodes)
        self._is_input = is_input
        self._used_names = {node.name for node in self._nodes} | {"state", "inputs"}
        self._bound: dict[str, Any] = {}
        self._names: dict[int, str] = {}  # by id of the bound object
        attribute_nodes = [node for node in self._nodes if node.op == "get_attr"]
        attribute_values = {str(node.target): self._attribute(node) for node in attribute_nodes}
        self._tensors = {
            name: value for name, value in attribute_values.items() if isinstance(value, Tensor)
        }
        self._attributes = {str(node.target): str(node.name) for node in attribute_nodes}

    def write(self) -> RankFunction:
        last_uses = _last_uses(self._nodes)
        lines = self._head()
        for node in self._nodes:
            if node.op == "call_function":
                lines.append(f"{node.name} = {self._call(node)}")
            elif node.op == "output":
                lines.append(f"return {self._format_argument(node.args[0])}")
            unused = [value.name for value in last_uses.get(node, ())]
            if unused:
                lines.append(f"del {', '.join(unused)}")
        source = "def run(state, inputs):\n" + "".join(f"    {line}\n" for line in lines)
        return RankFunction(_define(source, self._bound), self._tensors, source)

    def _head(self) -> list[str]:
        placeholders = [node.name for node in self._nodes if node.op == "placeholder"]
        roles = list(zip(placeholders, self._is_input, strict=True))
        state = [name for name, is_input in roles if not is_input]
        state += [self._attributes[name] for name in self._tensors]
        inputs = [name for name, is_input in roles if is_input]
        unpacked = [("state", state), ("inputs", inputs)]
        return [f"{', '.join(names)}, = {source}" for source, names in unpacked if names]

    def _call(self, node: fx.Node) -> str:
        if node.target is operator.getitem:
            return f"{self._format_argument(node.args[0])}[{self._format_argument(node.args[1])}]"
        function = self._bind(python_call(node.target), str(node.target))
        arguments = [self._format_argument(argument) for argument in node.args]
        arguments += [
            f"{name}={self._format_argument(argument)}" for name, argument in node.kwargs.items()
        ]
        return f"{function}({', '.join(arguments)})"

    def _format_argument(self, item: Any) -> str:
        """The source of an argument; an object without a literal is bound to a name."""
        match item:
            case fx.Node():
                return self._format_node(item)
            case tuple():
                return f"({''.join(self._format_argument(part) + ', ' for part in item)})"
            case list():
                return f"[{', '.join(self._format_argument(part) for part in item)}]"
            case slice():
                parts = (item.start, item.stop, item.step)
                return f"slice({', '.join(self._format_argument(part) for part in parts)})"
            case dict():
                pairs = (
                    f"{self._format_argument(key)}: {self._format_argument(part)}"
                    for key, part in item.items()
                )
                return f"{{{', '.join(pairs)}}}"
        if _has_literal(item):
            return repr(item)
        return self._bind(item, "constant")

    def _format_node(self, node: fx.Node) -> str:
        if node.op != "get_attr":
            return node.name
        if str(node.target) in self._tensors:
            return self._attributes[str(node.target)]
        return self._bind(self._attribute(node), str(node.target))

    def _attribute(self, node: fx.Node) -> Any:
        return operator.attrgetter(str(node.target))(self._graph_module)

    def _bind(self, value: Any, label: str) -> str:
        if id(value) not in self._names:
            identifier = "".join(char if char.isalnum() else "_" for char in label)
            name = f"_{identifier}"
            while name in self._used_names:
                name += "_"
            self._used_names.add(name)
            self._names[id(value)] = name
            self._bound[name] = value
        return self._names[id(value)]


def _has_literal(item: Any) -> bool:
    if isinstance(item, float):
        return type(item) is float and math.isfinite(item)
    return item is None or type(item) in (bool, int, str)


def _last_uses(nodes: Sequence[fx.Node]) -> dict[fx.Node, list[fx.Node]]:
    """By node, the computed values that no later node uses, which are deleted after it."""
    last: dict[fx.Node, fx.Node] = {}
    for node in nodes:
        if node.op == "call_function":
            last[node] = node
        last.update((used, node) for used in node.all_input_nodes if used in last)
    last_uses: dict[fx.Node, list[fx.Node]] = {}
    for value, user in last.items():
        if user.op != "output":
            last_uses.setdefault(user, []).append(value)
    return last_uses


def _define(source: str, bound: Mapping[str, Any]) -> Callable[..., Any]:
    name = f"<rank program {next(_numbers)}>"
    # Tracebacks look up source lines there.
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    scope = dict(bound)
    exec(compile(source, name, "exec"), scope)
    run: Callable[..., Any] = scope["run"]
    return run
