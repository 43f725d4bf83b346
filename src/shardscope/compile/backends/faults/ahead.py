"""Faults behind AOT autograd: in a decomposition while it traces, or in the partitioned graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from operator import getitem
from typing import Any, final

import torch
from torch import fx

from shardscope._torch.aot_backends import Compiled, partition_for_inductor
from shardscope._torch.autograd import is_in_backward
from shardscope._torch.decompositions import table_in_force
from shardscope._torch.pytree_values import flatten, unflatten
from shardscope.compile.backends.aot import compile_as_inductor_would
from shardscope.compile.backends.boxed import run_boxed
from shardscope.compile.backends.faults.effects import first_to_spoil, spoil, steps
from shardscope.compile.backends.faults.plan import Direction, FaultPlan, overloads
from shardscope.compile.backends.graphs import graphs_in, values_of

__all__ = ["compile_decomposed", "compile_partitioned"]


def compile_decomposed(
    gm: fx.GraphModule, example_inputs: Sequence[Any], *, plan: FaultPlan
) -> Compiled:
    """What Inductor would be given, were the op's decomposition wrong."""
    if plan.also and not _reaches(gm, example_inputs, plan.also):
        return compile_as_inductor_would(gm, example_inputs)
    wrong = _WrongDecomposition(plan)
    table = {**table_in_force(), **wrong.entries()}
    return compile_as_inductor_would(gm, example_inputs, table=table)


@final
class _WrongDecomposition:
    """Entries for the table: the op as it is taken apart rightly, or as it is, and the fault."""

    def __init__(self, plan: FaultPlan) -> None:
        self._plan = plan
        self._num_met = 0
        self._is_within = False

    def entries(self) -> dict[Any, Callable[..., Any]]:
        """One for each overload that the plan's op may be."""
        right = table_in_force()
        return {op: partial(self._run, op, right.get(op)) for op in overloads(self._plan.names)}

    def _run(self, op: Any, right: Callable[..., Any] | None, *args: Any, **kwargs: Any) -> Any:
        # Within the op itself, and within the fault, the op is right: else it would never end.
        if self._is_within or not self._is_chosen():
            return NotImplemented if right is None else right(*args, **kwargs)
        if self._plan.kind == "compile_error":
            raise self._plan.error(str(op))
        self._is_within = True
        try:
            return self._spoil(op(*args, **kwargs))
        finally:
            self._is_within = False

    def _is_chosen(self) -> bool:
        if not self._plan.goes("backward" if is_in_backward() else "forward"):
            return False
        self._num_met += 1
        return self._plan.nth in (None, self._num_met)

    def _spoil(self, result: Any) -> Any:
        values, structure = flatten(result)
        place = first_to_spoil(values)
        if place is not None:
            values[place] = spoil(values[place], self._plan)
        return unflatten(values, structure)


def _reaches(gm: fx.GraphModule, example_inputs: Sequence[Any], names: frozenset[str]) -> bool:
    """Whether one of the ops comes up when the graph is traced: found out by tracing it."""
    reached: list[Any] = []
    right = table_in_force()

    def note(op: Any, *args: Any, **kwargs: Any) -> Any:
        reached.append(op)
        return right[op](*args, **kwargs) if op in right else NotImplemented

    table = {**right, **{op: partial(note, op) for op in overloads(names)}}
    compile_as_inductor_would(gm, example_inputs, table=table)
    return bool(reached)


def compile_partitioned(
    gm: fx.GraphModule, example_inputs: Sequence[Any], *, plan: FaultPlan
) -> Compiled:
    """Graphs that are right until they are cut into forward and backward."""
    spoilt: list[fx.GraphModule] = []

    def partition(joint: fx.GraphModule, inputs: Any, **kwargs: Any) -> Any:
        parts = partition_for_inductor(joint, inputs, **kwargs)
        for part, direction in zip(parts, _DIRECTIONS, strict=True):
            _spoil_graph(part, plan, direction)
            spoilt.append(part)
        return parts

    def compile_graph(graph: fx.GraphModule, inputs: Sequence[Any]) -> Compiled:
        # A graph for inference was never cut.
        if not spoilt:
            _spoil_graph(graph, plan, "forward")
        return run_boxed(graph, inputs)

    return compile_as_inductor_would(gm, example_inputs, forward=compile_graph, partition=partition)


_DIRECTIONS: tuple[Direction, Direction] = ("forward", "backward")


def _spoil_graph(gm: fx.GraphModule, plan: FaultPlan, direction: Direction) -> None:
    if not plan.goes(direction):
        return
    found = plan.find(node for graph in graphs_in(gm) for node in graph.graph.nodes)
    plan.raise_if_compiling(found)
    for node in found:
        target = _result_to_spoil(node)
        if target is not None:
            _append(target, plan)
    for graph in graphs_in(gm):
        graph.recompile()


def _result_to_spoil(node: fx.Node) -> fx.Node | None:
    """`node`, or that of its several results which the fault is in; None if nobody takes one."""
    values = values_of(node) or []
    taken = [user for user in node.users if user.target is getitem]
    taken.sort(key=lambda user: str(user.args[1]))
    if not taken:
        return node if first_to_spoil(values) is not None else None
    place = first_to_spoil([user.meta.get("val") for user in taken])
    return None if place is None else taken[place]


def _append(node: fx.Node, plan: FaultPlan) -> None:
    """Let those who take what `node` gives take it with the fault in it."""
    (value,) = values_of(node) or [None]
    assert isinstance(value, torch.Tensor)
    users: Iterable[fx.Node] = list(node.users)
    last = node
    for op, args in steps(plan, value.dtype):
        with node.graph.inserting_after(last):
            new = node.graph.call_function(op, (last, *args))
        new.meta = dict(node.meta)
        last = new
    for user in users:
        user.replace_input_with(node, last)
