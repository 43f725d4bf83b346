"""Replaces random ops of a fragment by inputs with the values that eager execution drew."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, final

import torch
from torch import Tensor, fx

from shardscope.compile.diagnose.fragment import Fragment
from shardscope.compile.diagnose.judging.copies import copy_inputs
from shardscope.numerics.draws import Watching

__all__ = ["take_out_draws"]


def take_out_draws(fragment: Fragment, *, seed: int) -> Fragment | None:
    """The fragment with each random op replaced by its eager result; None if it has none.

    The arguments of a random op become outputs, so that the ops before it are still compared.
    """
    recording = _Recording(fragment.graph)
    torch.manual_seed(seed)
    with torch.set_grad_enabled(fragment.with_gradients):
        recording.run(*copy_inputs(fragment.inputs))
    if not recording.drawn:
        return None
    graph = fx.Graph()
    has_gradients = fragment.with_gradients and any(
        isinstance(one, Tensor) and one.requires_grad for one in fragment.inputs
    )
    cut = _Cut(graph, recording.drawn, has_gradients)
    inputs = cut.fill(fragment.graph.graph, fragment.inputs)
    return replace(fragment, graph=fx.GraphModule(fragment.graph, graph), inputs=inputs)


@final
class _Recording(fx.Interpreter):
    """Runs a graph and stores the results of random ops by the name of their node."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.drawn: dict[str, Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        watching = Watching()
        with watching:
            result = super().run_node(n)
        if watching.has_drawn and n.op.startswith("call_"):
            self.drawn[n.name] = _detach(result)
        return result


def _detach(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    return type(value)(map(_detach, value)) if isinstance(value, list | tuple) else value


@final
class _Cut:
    """Copies a graph with placeholders in place of random ops."""

    def __init__(self, graph: fx.Graph, drawn: dict[str, Any], has_gradients: bool) -> None:
        self._graph = graph
        self._drawn = drawn
        self._has_gradients = has_gradients
        self._copies: dict[fx.Node, Any] = {}
        self._taken: list[fx.Node] = []  # arguments of random ops
        self._added: list[Tensor] = []

    def fill(self, graph: fx.Graph, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """Copy `graph`, and return the inputs of the copy."""
        for node in graph.nodes:
            if node.op == "placeholder":
                self._copies[node] = self._graph.node_copy(node)
        for name in self._drawn_in(graph):  # placeholders come first
            self._drawn[name] = self._place(name, self._drawn[name])
        for node in graph.nodes:
            if node.op == "output":
                self._end(node)
            elif node.name in self._drawn:
                self._skip(node)
            elif node.op != "placeholder":
                self._copy(node)
        self._graph.lint()
        return (*inputs, *self._added)

    def _drawn_in(self, graph: fx.Graph) -> Iterator[str]:
        return (node.name for node in graph.nodes if node.name in self._drawn)

    def _place(self, name: str, value: Any) -> Any:
        """A placeholder for a tensor, or a list of placeholders for the results of an op."""
        if isinstance(value, list | tuple):
            return [self._place(f"{name}_{index}", one) for index, one in enumerate(value)]
        if not isinstance(value, Tensor):
            return value
        needs_gradient = self._has_gradients and value.is_floating_point()
        self._added.append(value.requires_grad_(needs_gradient))
        return self._graph.placeholder(f"drawn_{name}")

    def _skip(self, node: fx.Node) -> None:
        placed = self._drawn[node.name]
        for one in node.all_input_nodes:
            copied = self._copies[one]
            if isinstance(copied, fx.Node) and copied.op != "placeholder":
                self._taken.append(copied)
        self._copies[node] = placed
        if _writes(node):  # later nodes read the random numbers
            self._copies[node.all_input_nodes[0]] = placed

    def _copy(self, node: fx.Node) -> None:
        source, index = node.args if node.target is operator.getitem else (None, None)
        copied = self._copies.get(source) if isinstance(source, fx.Node) else None
        if isinstance(copied, list) and isinstance(index, int):
            self._copies[node] = copied[index]
        else:
            self._copies[node] = self._graph.node_copy(node, lambda one: self._copies[one])

    def _end(self, node: fx.Node) -> None:
        given = node.args[0]
        outputs = list(given) if isinstance(given, list | tuple) else [given]
        kept = [self._copies[one] if isinstance(one, fx.Node) else one for one in outputs]
        self._graph.output((*kept, *dict.fromkeys(self._taken)))


def _writes(node: fx.Node) -> bool:
    """Whether a random op writes into its first argument."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    is_in_place = name.endswith("_") and not name.endswith("__")
    return bool(node.all_input_nodes) and (is_in_place or bool(node.kwargs.get("inplace")))
