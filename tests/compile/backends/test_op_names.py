"""An op has one name, however the user or the graph writes it."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from case_ids import without_address
from shardscope.compile.backends.op_names import name_of_node, names_meant
from shardscope.errors import BackendError

functional = nn.functional


@pytest.mark.parametrize(
    "op",
    [
        "relu",
        " relu ",
        "relu_",
        "torch.relu",
        "torch.relu_",
        "F.relu",
        "F.relu(x)",
        "nn.functional.relu",
        "torch.nn.functional.relu",
        "nn.ReLU",
        "nn.ReLU()",
        "torch.nn.ReLU",
        "ReLU",
        "x.relu()",
        "x.relu",
        "hidden.relu_()",
        "Tensor.relu",
        "torch.Tensor.relu_",
        "aten.relu",
        "aten.relu_",
        "aten.relu.default",
        "aten::relu",
        "aten::relu.default",
        "torch.ops.aten.relu.default",
        torch.relu,
        torch.relu_,
        functional.relu,
        nn.ReLU,
        nn.ReLU(inplace=True),
        torch.ops.aten.relu,
        torch.ops.aten.relu_,
        torch.ops.aten.relu.default,
        torch.Tensor.relu,
        torch.Tensor.relu_,
    ],
    ids=without_address,
)
def test_every_spelling_of_relu_means_relu(op: Any) -> None:
    assert names_meant(op) == {"relu"}


@pytest.mark.parametrize(
    ("op", "name"),
    [
        ("+", "add"),
        ("+=", "add"),
        ("x.add_(1)", "add"),
        (operator.add, "add"),
        (operator.iadd, "add"),
        ("operator.iadd", "add"),
        (Tensor.__radd__, "add"),
        ("aten.add.Tensor", "add"),
        ("/", "div"),
        ("operator.truediv", "div"),
        (torch.true_divide, "div"),
        ("//", "floor_divide"),
        ("~", "bitwise_not"),
        ("&=", "bitwise_and"),
        (operator.or_, "bitwise_or"),
        (Tensor.__or__, "bitwise_or"),
        ("<=", "le"),
        ("@", "matmul"),
        (Tensor.__rmatmul__, "matmul"),
        ("nn.LayerNorm", "layer_norm"),
        ("aten.native_layer_norm", "layer_norm"),
        ("native_layer_norm_backward", "layer_norm_backward"),
        ("nn.Linear", "linear"),
        (functional.linear, "linear"),
        ("x.softmax(-1)", "softmax"),
        ("_softmax", "softmax"),
        ("torch.special.softmax", "softmax"),
        ("nn.BatchNorm3d", "batch_norm"),
        ("aten._native_batch_norm_legit_functional", "batch_norm"),
        ("batch_norm_backward", "batch_norm_backward"),
        ("nn.CrossEntropyLoss", "cross_entropy"),
        ("nn.MSELoss", "mse_loss"),
        ("nn.BCEWithLogitsLoss", "binary_cross_entropy_with_logits"),
        ("nn.Dropout", "dropout"),
        ("aten.native_dropout.default", "dropout"),
        ("aten._scaled_dot_product_flash_attention_for_cpu", "scaled_dot_product_attention"),
        ("torch.linalg.norm", "linalg_norm"),
        ("x.to(torch.float16)", "to"),
        ("aten._to_copy.default", "to"),
        ("torch.concat", "cat"),
        ("threshold_backward", "threshold_backward"),
        ("prims.sin", "prims::sin"),
    ],
    ids=without_address,
)
def test_other_ops_have_one_name_too(op: Any, name: str) -> None:
    assert names_meant(op) == {name}


def test_some_ops_have_a_name_of_aten_below_the_one_people_write() -> None:
    assert names_meant("nn.Conv2d") == {"conv2d", "convolution"}
    assert names_meant(functional.max_pool2d) == {"max_pool2d", "max_pool2d_with_indices"}
    assert names_meant("convolution") == {"convolution"}


def own(x: Tensor) -> Tensor:
    return x


@pytest.mark.parametrize(
    "op",
    [
        "relux",
        "torch.relux",
        "aten.relu.nonsense",
        "mylib::relu",
        "nn.Sequential",
        "torch.save",
        "",
        ".",
        "F.",
        "x.y.z",
        "lambda x: x",
        nn.Module,
        nn.Sequential(),
        torch.save,
        own,
        len,
        int,
        3,
        None,
    ],
    ids=without_address,
)
def test_a_name_that_is_not_an_op_is_refused(op: Any) -> None:
    with pytest.raises(
        BackendError, match=r"is not an op that torch has\..* Write it as you would"
    ):
        names_meant(op)


def test_an_op_of_another_library_keeps_the_library_in_its_name() -> None:
    import backend_cases

    assert names_meant("backend_cases::honest") == {"backend_cases::honest"}
    assert names_meant("backend_cases.honest.default") == {"backend_cases::honest"}
    assert names_meant(torch.ops.backend_cases.honest) == {"backend_cases::honest"}
    assert backend_cases.honest is not None


def add_in_place(x: Tensor) -> Tensor:
    x = x.clone()
    x += 1
    return x


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (lambda x: torch.relu(x), "relu"),
        (lambda x: functional.relu(x), "relu"),
        (lambda x: functional.relu(x, inplace=True), "relu"),
        (lambda x: x.relu(), "relu"),
        (lambda x: x.clone().relu_(), "relu"),
        (nn.ReLU(), "relu"),
        (lambda x: torch.ops.aten.relu.default(x), "relu"),
        (lambda x: torch.ops.aten.relu(x), "relu"),
        (lambda x: x + 1, "add"),
        (lambda x: 1 + x, "add"),
        (add_in_place, "add"),
        (lambda x: x.add(1), "add"),
        (lambda x: torch.add(x, 1), "add"),
        (lambda x: x / 2, "div"),
        (lambda x: x.softmax(-1), "softmax"),
        (nn.Softmax(-1), "softmax"),
        (nn.LayerNorm(4), "layer_norm"),
        (nn.Linear(4, 4), "linear"),
        (nn.GELU(), "gelu"),
        (nn.MaxPool1d(2), "max_pool1d"),
    ],
)
def test_nodes_of_dynamos_graphs_have_that_name(
    function: Callable[[Tensor], Tensor], name: str
) -> None:
    names: list[str | None] = []

    def backend(gm: fx.GraphModule, inputs: Any) -> Any:
        names.extend(name_of_node(node) for node in gm.graph.nodes)
        return gm.forward

    torch.compiler.reset()
    torch.compile(function, backend=backend)(torch.ones(4, 4))
    assert name in names


def test_modules_that_were_not_inlined_are_ops_too() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Sequential())
    names = [name_of_node(node) for node in fx.symbolic_trace(model).graph.nodes]
    assert names == [None, "linear", "relu", None]


def test_user_functions_are_not_ops_whatever_their_name() -> None:
    def relu(x: Tensor) -> Tensor:
        return x

    graph = fx.Graph()
    node = graph.call_function(relu, (graph.placeholder("x"),))
    assert name_of_node(node) is None
