"""A graph as a function: the same numbers, and memory freed as early as possible."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from shardscope.parallel.runtime.rank_function import write_function


def build_module(
    build: Callable[[fx.Graph], Any], holder: nn.Module | None = None
) -> fx.GraphModule:
    graph = fx.Graph()
    graph.output(build(graph))
    return fx.GraphModule(holder or nn.Module(), graph)


def test_state_and_inputs_are_separated_in_order() -> None:
    def build(graph: fx.Graph) -> Any:
        first, second, third = (graph.placeholder(name) for name in ("one", "two", "three"))
        return (graph.call_function(torch.sub, (first, second)), third, 7, None)

    function = write_function(build_module(build), is_input=[True, False, True])
    assert function.run([1.0 * torch.ones(1)], [torch.tensor([3.0]), "x"]) == (2.0, "x", 7, None)


def test_arguments_of_all_kinds_arrive_as_they_are() -> None:
    seen: list[Any] = []

    def take(*args: Any, **kwargs: Any) -> Tensor:
        seen.append((args, kwargs))
        return torch.ones(1)

    arguments: tuple[Any, ...] = (
        [1, 2.5, (3,), ()],
        slice(None, 4),
        {"key": [True, None]},
        math.inf,
        -math.inf,
        torch.float16,
        torch.device("meta"),
        torch.contiguous_format,
        "it's",
        1 + 2j,
    )
    module = build_module(lambda graph: graph.call_function(take, arguments, {"name": arguments}))
    write_function(module, is_input=[]).run([], [])
    assert seen == [(arguments, {"name": arguments})]


def test_a_value_is_freed_after_its_last_use() -> None:
    alive: list[bool] = []
    references: list[weakref.ref[Tensor]] = []

    def make(x: Tensor) -> Tensor:
        result = x + 1
        references.append(weakref.ref(result))
        return result

    def look(x: Tensor) -> Tensor:
        alive.append(references[0]() is not None)
        return x * 2

    def build(graph: fx.Graph) -> Any:
        first = graph.call_function(make, (graph.placeholder("x"),))
        used = graph.call_function(look, (first,))
        graph.call_function(make, (used,))  # which nobody uses
        return (graph.call_function(look, (used,)),)

    write_function(build_module(build), is_input=[True]).run([], [torch.ones(2)])
    assert alive == [True, False]
    assert [reference() for reference in references] == [None, None]


def test_names_of_nodes_do_not_hide_what_is_called() -> None:
    def build(graph: fx.Graph) -> Any:
        x = graph.placeholder("_aten_neg_default")
        y = graph.create_node("call_function", torch.ops.aten.neg.default, (x,), name="state")
        return (graph.call_function(torch.ops.aten.neg.default, (y,)), y)

    function = write_function(build_module(build), is_input=[True])
    assert function.run([], [torch.tensor(2.0)]) == (2.0, -2.0)


def test_tensor_attributes_of_a_graph_come_with_the_state() -> None:
    holder = nn.Module()
    holder.register_buffer("table", torch.tensor([5.0]))
    holder.other = nn.ReLU()

    def build(graph: fx.Graph) -> Any:
        x = graph.placeholder("x")
        table = graph.get_attr("table")
        call = graph.call_function(
            lambda module, value: module(value), (graph.get_attr("other"), x)
        )
        return (graph.call_function(torch.add, (call, table)), graph.get_attr("table"))

    function = write_function(build_module(build, holder), is_input=[False])
    assert list(function.attributes) == ["table"]
    assert function.attributes["table"] is holder.table
    assert function.run([torch.tensor([-1.0]), torch.tensor([6.0])], []) == (6.0, 6.0)


def test_a_traceback_shows_the_line() -> None:
    module = build_module(
        lambda graph: graph.call_function(torch.mm, (graph.placeholder("x"),) * 2)
    )
    with pytest.raises(RuntimeError) as caught:
        write_function(module, is_input=[True]).run([], [torch.ones(2, 3)])
    assert "mm = " in str(caught.traceback[-1].statement)
