"""Faults at stage 'graph': the graph that dynamo captured goes wrong, and runs eagerly."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import methodcaller
from typing import Any, final

import torch
from torch import fx

from shardscope._torch.aot_backends import Compiled
from shardscope._torch.dispatch import has_fakes
from shardscope._torch.pytree_values import flatten, unflatten, version_of
from shardscope.compile.backends.faults.effects import FAILING, fail_now, first_to_spoil, spoil
from shardscope.compile.backends.faults.plan import FaultPlan
from shardscope.compile.backends.graphs import copy_graph, graphs_in, values_of

__all__ = ["compile_captured"]


def compile_captured(
    gm: fx.GraphModule, example_inputs: Sequence[Any], *, plan: FaultPlan
) -> Compiled:
    """Dynamo's graph with the fault in it."""
    copy = copy_graph(gm)
    nodes = [node for graph in graphs_in(copy) for node in graph.graph.nodes if _may_spoil(node)]
    found = plan.find(nodes)
    plan.raise_if_compiling(found)
    for node in found:
        _replace(node, _Faulty(_call_of(node), plan, name=node.name))
    for graph in graphs_in(copy):
        graph.recompile()
    return copy.forward


def _may_spoil(node: fx.Node) -> bool:
    """Sums of sizes are no ops on tensors."""
    values = values_of(node)
    return values is None or any(isinstance(value, torch.Tensor) for value in values)


def _call_of(node: fx.Node) -> Callable[..., Any]:
    if node.op == "call_method":
        return lambda tensor, *args, **kwargs: methodcaller(str(node.target), *args, **kwargs)(
            tensor
        )
    if node.op == "call_module":
        assert node.graph.owning_module is not None
        return node.graph.owning_module.get_submodule(str(node.target))
    assert callable(node.target)
    return node.target


def _replace(node: fx.Node, target: Callable[..., Any]) -> None:
    with node.graph.inserting_before(node):
        new = node.graph.call_function(target, node.args, node.kwargs)
    new.meta = dict(node.meta)
    node.replace_all_uses_with(new)
    node.graph.erase_node(node)


@final
class _Faulty:
    """An op whose result, or the gradient that comes back to it, is wrong or never comes."""

    def __init__(self, call: Callable[..., Any], plan: FaultPlan, *, name: str) -> None:
        # The code that fx writes calls a function by these.
        self.__name__ = self.__qualname__ = f"faulty_{name}"
        self._call = call
        self._plan = plan

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = [one for one in flatten((args, kwargs))[0] if isinstance(one, torch.Tensor)]
        versions = {id(one): version_of(one) for one in given}
        values, structure = flatten(self._call(*args, **kwargs))
        place = first_to_spoil(values)
        if place is not None:
            value = values[place]
            is_written = versions.get(id(value), version_of(value)) != version_of(value)
            values[place] = self._spoil_result(value, is_written=is_written)
        return unflatten(values, structure)

    def _spoil_result(self, value: torch.Tensor, *, is_written: bool) -> torch.Tensor:
        if self._plan.goes("forward"):
            spoilt = self._spoil(value)
            if is_written:
                # Whoever else holds the tensor sees it too; autograd is not to count it.
                value.data.copy_(spoilt.detach())
            else:
                value = spoilt
        if self._plan.goes("backward") and value.requires_grad and not has_fakes(value):
            value.register_hook(self._spoil)  # type: ignore[no-untyped-call]
        return value

    def _spoil(self, value: torch.Tensor) -> torch.Tensor:
        if self._plan.kind in FAILING and not has_fakes(value):
            fail_now(self._plan.kind, str(self._plan.error()))
        return spoil(value, self._plan)
