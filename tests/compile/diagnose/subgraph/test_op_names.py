"""Ops go by the names that people know them under, and never by an address."""

from __future__ import annotations

import math
import operator
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend

from repro_backends import shifted
from repro_scripts import capture
from shardscope.compile.diagnose.repro.literals import Names, comment, format_index, format_value
from shardscope.compile.diagnose.subgraph.op_names import NotPrintable, format_target, name_op

NAMES: list[tuple[Any, str]] = [
    (torch.relu, "torch.relu"),
    (functional.relu, "torch.nn.functional.relu"),
    (functional.gelu, "torch.nn.functional.gelu"),
    (functional.scaled_dot_product_attention, "torch.nn.functional.scaled_dot_product_attention"),
    (torch.linalg.norm, "torch.linalg.norm"),
    (torch.special.erf, "torch.special.erf"),
    (torch.fft.rfft, "torch.fft.rfft"),
    (torch.Tensor.relu, "torch.Tensor.relu"),
    (torch.ops.aten.relu.default, "aten.relu.default"),
    (torch.ops.aten.relu, "aten.relu"),
    (operator.add, "operator.add"),
    (math.sqrt, "math.sqrt"),
    (max, "max"),
    (shifted, "repro_backends.shifted"),
]


@pytest.mark.parametrize(("target", "name"), NAMES)
def test_a_function_is_named_as_people_write_it(target: Any, name: str) -> None:
    graph = fx.Graph()
    assert name_op(graph.call_function(target, (graph.placeholder("x"),))) == name


@pytest.mark.parametrize("target", [target for target, _ in NAMES if target is not shifted])
def test_the_source_text_of_a_function_leads_to_it(target: Any) -> None:
    scope = {"torch": torch, "math": math, "operator": operator}
    assert eval(format_target(target), scope) is target


def test_methods_and_modules_are_named_too() -> None:
    class Own(nn.Module):
        pass

    graph = fx.Graph()
    x = graph.placeholder("x")
    method = graph.call_method("relu", (x,))
    graph.call_module("up", (x,))
    graph.call_module("own", (x,))
    root = nn.Module()
    root.up, root.own = nn.Linear(1, 1), Own()
    graph.output((method,))
    holder = fx.GraphModule(root, graph)
    names = [name_op(node) for node in holder.graph.nodes]
    assert names[1:4] == [
        "Tensor.relu",
        "torch.nn.Linear",
        "test_methods_and_modules_are_named_too.<locals>.Own",
    ]


def test_ops_that_take_functions_go_by_what_people_call() -> None:
    subgraph = capture(
        lambda x: torch.cond(x.sum() > 0, lambda y: y.sin(), lambda y: y.cos(), (x,)),
        torch.ones(2),
    )
    names = [name_op(node) for node in subgraph.graph.graph.nodes]
    assert "torch.cond" in names


class Unnamed:
    """A callable without a name."""

    def __call__(self, x: Any) -> Any:
        return x


def test_what_has_no_name_goes_by_its_class() -> None:
    graph = fx.Graph()
    node = graph.create_node("call_function", Unnamed(), (), {}, name="unnamed")
    assert name_op(node) == "Unnamed"
    with pytest.raises(NotPrintable, match="Unnamed cannot be reached"):
        format_target(Unnamed())


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        -3,
        0.1,
        float("inf"),
        -float("inf"),
        1 + 2j,
        complex(-0.0, float("inf")),
        "quo\"te's\n",
        "plain",
        b"\x00",
        (),
        (1,),
        [1, (2, [])],
        {"a": [1.5], 2: None},
        {3, 1, 2},
        slice(1, None, -2),
        Ellipsis,
        torch.float8_e4m3fn,
        torch.channels_last,
        torch.sparse_coo,
        torch.device("cuda", 1),
        torch.Size([2, 3]),
        SDPBackend.MATH,
        range(3),
    ],
)
def test_a_value_is_written_so_that_it_comes_back(value: Any) -> None:
    assert eval(format_value(value), {"torch": torch}) == value


@pytest.mark.parametrize(
    ("index", "text"),
    [
        ((slice(None), slice(1, None)), ":, 1:"),
        ((None, ..., slice(None, None, 2)), "None, ..., ::2"),
        ((slice(-1, None),), "-1:,"),
        ([0, 2], "[0, 2]"),
        (3, "3"),
        ((), "()"),
    ],
)
def test_an_index_is_written_as_people_write_it(index: Any, text: str) -> None:
    assert format_index(index) == text


@pytest.mark.parametrize("value", [object(), Unnamed(), Unnamed])
def test_a_value_without_a_literal_form_is_refused(value: Any) -> None:
    with pytest.raises(NotPrintable):
        format_value(value)


@pytest.mark.parametrize(
    ("wish", "name"),
    [
        ("L_self_modules_up_parameters_weight_", "up_weight"),
        ("L_x_", "x"),
        ("L_args_0_", "args_0"),
        ("L_self_modules_layers_modules_0_modules_norm_buffers_mean_", "layers_0_norm_mean"),
        ("class", "class_1"),
        ("torch", "torch_1"),
        ("a b\n;import os", "a_b__import_os"),
        ("", "value"),
        ("ünï", "n"),
        ("0", "v0"),
    ],
)
def test_inputs_get_short_names_that_python_takes(wish: str, name: str) -> None:
    given = Names().give_input(wish)
    assert given.isidentifier()
    assert given.strip("_") == name.strip("_")


def test_no_two_things_have_the_same_name() -> None:
    names = Names()
    assert [names.give("x") for _ in range(3)] == ["x", "x_1", "x_2"]
    assert names.give("x_1") == "x_1_1"


def test_a_comment_is_one_line_of_printable_text() -> None:
    assert comment("a\nb\r\x00c\u2028d\u202e") == "a b c d"
    assert len(comment("x" * 500, width=50)) == 50
