"""Which op of the graphs that AOT autograd made is to blame: ops below those that dynamo sees."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, final

import torch
from torch import fx

from shardscope._torch.aot_stages import AotRun, Compile, Handed, call_compiled
from shardscope._torch.dispatch import is_overload

__all__ = ["compile_apart", "find_changed_op", "list_ops"]

_SEED = 17


def list_ops(aot: AotRun, *, is_backward: bool) -> Iterator[tuple[str, str]]:
    """Names of nodes and ops of the graphs that were handed to compilers, in one direction."""
    for handed in aot.handed:
        if handed.is_backward == is_backward:
            for node in handed.graph.graph.nodes:
                if _can_be_alone(node):
                    yield node.name, str(node.target)


def _can_be_alone(node: fx.Node) -> bool:
    return node.op == "call_function" and is_overload(node.target) and "val" in node.meta


def compile_apart(names: Collection[str], *, is_backward: bool) -> Callable[..., Any]:
    """Have some ops compiled, each as a graph of its own, and all others run as they are."""

    def compile_graph(
        own: Compile, graph: fx.GraphModule, example_inputs: Sequence[Any], goes_back: bool
    ) -> Any:
        compiled = {
            node.name: own(*_make_graph(node))
            for node in graph.graph.nodes
            if goes_back == is_backward and node.name in names and _can_be_alone(node)
        }
        return _Mixed(graph, compiled).run

    return compile_graph


def _make_graph(node: fx.Node) -> tuple[fx.GraphModule, list[Any]]:
    """The graph of one op, which takes what the op takes from others, and an example of that."""
    graph = fx.Graph()
    copies = {}
    for one in node.all_input_nodes:
        copies[one] = graph.placeholder(one.name)
        copies[one].meta.update(one.meta)
    result = graph.node_copy(node, lambda one: copies[one])
    graph.output(tuple(_take_outputs(graph, result)))
    return fx.GraphModule({}, graph), [one.meta["val"] for one in node.all_input_nodes]


def _take_outputs(graph: fx.Graph, result: fx.Node) -> list[fx.Node]:
    values = result.meta["val"]
    if not isinstance(values, tuple | list):
        return [result]
    outputs = [
        graph.call_function(operator.getitem, (result, index)) for index in range(len(values))
    ]
    for node, value in zip(outputs, values, strict=True):
        node.meta["val"] = value
    return outputs


@final
class _Mixed(fx.Interpreter):
    """Runs a graph in which what was compiled stands for some of the ops."""

    def __init__(self, graph: fx.GraphModule, compiled: Mapping[str, Callable[..., Any]]) -> None:
        super().__init__(graph)
        self._compiled = compiled

    def run_node(self, n: fx.Node) -> Any:
        if n.name not in self._compiled:
            return super().run_node(n)
        args = [self.env[one] for one in n.all_input_nodes]
        values = call_compiled(self._compiled[n.name], args)
        return tuple(values) if isinstance(n.meta["val"], tuple | list) else values[0]


def _compute(graph: fx.GraphModule, inputs: Sequence[Any]) -> dict[fx.Node, Any]:
    """What each node of a graph computes; of placeholders, what they are before anything runs."""
    keeper = _Keeper(graph)
    copies = [one.clone() if isinstance(one, torch.Tensor) else one for one in inputs]
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(_SEED)
        keeper.run(*copies)
    return keeper.values | dict(zip(_placeholders(graph), inputs, strict=True))


@final
class _Keeper(fx.Interpreter):
    def __init__(self, graph: fx.GraphModule) -> None:
        super().__init__(graph)
        self.values: dict[fx.Node, Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        self.values[n] = value = super().run_node(n)
        return value


def find_changed_op(aot: AotRun) -> str:
    """The first op of forward and backward that computes something else than in the joint graph."""
    # Of a backend that was called more than once, the last time.
    graphs = [one for one in aot.handed if one.inputs is not None][-2:]
    joint = _compute_joint(aot.joint, graphs)
    changed = [op for one in graphs for op in _changed_ops(one, joint)]
    return changed[0] if joint and changed else ""


def _compute_joint(joint: fx.GraphModule | None, graphs: Sequence[Handed]) -> dict[str, Any]:
    """What each node of the joint graph computes, given what its parts were given."""
    if joint is None:
        return {}
    given = {
        node.name: value
        for handed in graphs
        for node, value in zip(_placeholders(handed.graph), handed.inputs or (), strict=False)
    }
    names = [node.name for node in _placeholders(joint)]
    if not all(name in given for name in names):
        return {}
    values = _compute(joint, [given[name] for name in names])
    return {node.name: value for node, value in values.items()}


def _changed_ops(handed: Handed, joint: Mapping[str, Any]) -> Iterator[str]:
    assert handed.inputs is not None
    direction = "backward" if handed.is_backward else "forward"
    for node, value in _compute(handed.graph, handed.inputs).items():
        if node.op != "call_function" or not is_overload(node.target):
            continue
        if node.name not in joint:
            takes = [str(one.target) for one in node.all_input_nodes]
            yield f"{node.target} that was added after {', '.join(takes)} in the {direction} graph"
        elif not _is_equal(value, joint[node.name]):
            yield f"{node.target} in the {direction} graph"


def _is_equal(one: Any, other: Any) -> bool:
    if isinstance(one, tuple | list) and isinstance(other, tuple | list):
        return len(one) == len(other) and all(map(_is_equal, one, other))
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        both = (one.shape, one.dtype) == (other.shape, other.dtype)
        return both and torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)
    return type(one) is type(other)


def _placeholders(graph: fx.GraphModule) -> list[fx.Node]:
    return [node for node in graph.graph.nodes if node.op == "placeholder"]
