"""Takes an op apart into ops that can run on pieces."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, final

import torch
from torch import fx
from torch.export import default_decompositions
from torch.fx.experimental.proxy_tensor import make_fx

from shardscope._torch.dispatch import is_overload, op_schema
from shardscope.parallel.flow import Step, Value, map_nest, values_in
from shardscope.parallel.rules.lookup import find_decomposition
from shardscope.parallel.source import lower_op, name_arguments, read_result
from shardscope.parallel.symbols import OpenSizes

__all__ = ["Apart", "take_apart"]


@final
@dataclass(frozen=True)
class Apart:
    """The steps that do what one did, and the values that stand for its results."""

    steps: list[Step]
    results: dict[Value, Value]  # old to new
    is_ours: bool  # a decomposition that we wrote for the sake of pieces


def take_apart(step: Step, sizes: OpenSizes) -> Apart | None:
    """The step in pieces: as we know the op, else as torch does; None where neither helps."""
    ours = find_decomposition(step.op) if is_overload(step.op) else None
    function = ours or _torchs(step.op)
    if function is None:
        return None
    graph, inputs = _trace(function, step)
    if graph is None or _is_the_same(graph, step.op):
        return None
    return _read(graph, inputs, step, sizes, is_ours=ours is not None)


def _torchs(op: Any) -> Callable[..., Any] | None:
    if not is_overload(op):
        return None
    function: Callable[..., Any] | None = default_decompositions().get(op)
    return function


def _trace(function: Callable[..., Any], step: Step) -> tuple[fx.Graph | None, list[Value]]:
    """The graph of the function on the step's arguments, its placeholders in order."""
    inputs = list(dict.fromkeys(one for one in values_in(step.arguments) if _is_open(one)))
    examples = [one.example for one in inputs]

    def call(*values: Any) -> Any:
        given = dict(zip(inputs, values, strict=True))
        arguments = map_nest(step.arguments, lambda one: _fill(one, given))
        return function(*arguments.values()) if _is_positional(step) else function(**arguments)

    try:
        return make_fx(call, pre_dispatch=True)(*examples).graph, inputs
    except NotImplementedError:
        return None, inputs


def _is_open(value: Value) -> bool:
    return value.is_tensor or isinstance(value.example, torch.SymInt)


def _fill(item: Any, given: dict[Value, Any]) -> Any:
    if not isinstance(item, Value):
        return item
    return given.get(item, item.example)


def _is_positional(step: Step) -> bool:
    return not any(one.kwarg_only for one in op_schema(step.op).arguments)


def _is_the_same(graph: fx.Graph, op: Any) -> bool:
    return [node.target for node in graph.nodes if node.op == "call_function"] == [op]


def _read(
    graph: fx.Graph, inputs: list[Value], step: Step, sizes: OpenSizes, *, is_ours: bool
) -> Apart:
    known: dict[fx.Node, Any] = {}
    steps: list[Step] = []
    given = iter(inputs)
    result: Any = None
    for node in graph.nodes:
        if node.op == "placeholder":
            known[node] = next(given)
        elif node.op == "output":
            result = map_nest(node.args[0], lambda one: _known(one, known))
        elif node.op == "call_function":
            _read_call(node, known, steps, step, sizes)
    return Apart(steps, _match(step.result, result), is_ours)


def _read_call(
    node: fx.Node, known: dict[fx.Node, Any], steps: list[Step], step: Step, sizes: OpenSizes
) -> None:
    if node.target.__name__ == "getitem":  # type: ignore[union-attr]
        known[node] = known[node.args[0]][node.args[1]]  # type: ignore[index]
        return
    known[node] = read_result(f"{step.origin.node}_{node.name}", node.meta["val"], sizes)
    op = lower_op(node.target)
    arguments = name_arguments(op, node.args, node.kwargs)
    steps.append(
        Step(
            op=op,
            arguments=map_nest(arguments, lambda one: _known(one, known)),
            outputs=list(values_in(known[node])),
            result=known[node],
            origin=replace(
                step.origin,
                op=str(node.target),
                part_of=step.origin.part_of or step.origin.op,
            ),
            is_rewritten=True,
        )
    )


def _known(item: Any, known: dict[fx.Node, Any]) -> Any:
    return known[item] if isinstance(item, fx.Node) else item


def _match(old: Any, new: Any) -> dict[Value, Value]:
    """Which new value stands for which old one."""
    pairs = list(zip(values_in(old), values_in(new), strict=True))
    for before, after in pairs:
        if after.origin is None and not after.placements:
            after.origin = before.root
    return dict(pairs)
