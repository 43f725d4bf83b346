"""The Python function for an op dispatches the same ops on the same arguments."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from shardscope.parallel.runtime.rank_function import PYTHON_CALLS, python_call

X = torch.arange(24.0).reshape(4, 6) / 24 + 0.1
Y = X.flip(0) * 2
SQUARE = X[:, :4].contiguous()
MASK = X > 0.5
CUBE = X.reshape(2, 2, 6)
INDEX = torch.tensor([2, 0])
HEADS = torch.randn(1, 2, 4, 8)

UNARY = [
    "abs",
    "bitwise_not",
    "clone",
    "cos",
    "erf",
    "exp",
    "log",
    "logical_not",
    "neg",
    "reciprocal",
    "relu",
    "rsqrt",
    "sigmoid",
    "silu",
    "sin",
    "sqrt",
    "t",
    "tanh",
    "contiguous",
    "gelu",
    "tril",
    "triu",
    "sum",
]
BINARY = [
    "add.Tensor",
    "div.Tensor",
    "mul.Tensor",
    "sub.Tensor",
    "maximum",
    "minimum",
    "eq.Tensor",
    "ge.Tensor",
    "gt.Tensor",
    "le.Tensor",
    "lt.Tensor",
    "ne.Tensor",
    "type_as",
    "logical_and",
    "logical_or",
]
SCALAR = [
    "eq.Scalar",
    "ge.Scalar",
    "gt.Scalar",
    "le.Scalar",
    "lt.Scalar",
    "ne.Scalar",
    "pow.Tensor_Scalar",
    "rsub.Scalar",
    "clamp_min",
    "add.Tensor",
    "mul.Tensor",
]

Arguments = tuple[tuple[Any, ...], dict[str, Any]]

ARGUMENTS: list[tuple[str, Arguments]] = [
    *((name, ((MASK if name.startswith("bit") else X,), {})) for name in UNARY),
    *((name, ((X, Y), {})) for name in BINARY),
    *((name, ((X, 2), {})) for name in SCALAR),
    ("add.Tensor", ((X, Y), {"alpha": 3})),
    ("add.Tensor", ((X.half(), Y), {})),
    ("addmm", ((X[0, :4], SQUARE, SQUARE), {})),
    ("all.dim", ((MASK, -1, True), {})),
    ("amax", ((X, [0], True), {})),
    ("amax", ((X,), {})),
    ("any.dim", ((MASK, 1), {})),
    ("argmax", ((X, 1, True), {})),
    ("argmax", ((X,), {})),
    ("baddbmm", ((CUBE[:, :, :2], CUBE, CUBE.transpose(1, 2)), {"beta": 0.5})),
    ("bitwise_and.Tensor", ((MASK, ~MASK), {})),
    ("bitwise_or.Tensor", ((MASK, MASK), {})),
    ("bmm", ((CUBE, CUBE.transpose(1, 2)), {})),
    ("cat", (([X, Y], 1), {})),
    ("cat", (([X, Y],), {})),
    ("clamp", ((X, None, 0.5), {})),
    ("clamp", ((X, 0.2), {})),
    ("clone", ((X.t(),), {"memory_format": torch.contiguous_format})),
    ("contiguous", ((X.t(),), {})),
    ("cumsum", ((X, -1), {"dtype": torch.float64})),
    ("embedding", ((X, INDEX, 1, False, False), {})),
    ("expand", ((X, [2, 4, 6]), {})),
    ("flip", ((X, [0, 1]), {})),
    ("gelu", ((X,), {"approximate": "tanh"})),
    ("index_select", ((X, 0, INDEX), {})),
    ("layer_norm", ((X, [6], X[0], X[1], 1e-6, False), {})),
    ("linear", ((X, Y), {})),
    ("linear", ((X, Y, X[:, 0]), {})),
    ("logsumexp", ((X, [0], True), {})),
    ("masked_fill.Scalar", ((X, MASK, -1.0), {})),
    ("masked_fill.Tensor", ((X, MASK, torch.tensor(2.0)), {})),
    ("masked_fill_.Scalar", ((X.clone(), MASK, 0), {})),
    ("matmul", ((CUBE, X.t()), {})),
    ("mean.dim", ((X, [-1], True), {})),
    ("mean.dim", ((X, None), {"dtype": torch.float64})),
    ("mm", ((X, X.t()), {})),
    ("native_layer_norm", ((X, [6], None, None, 1e-5), {})),
    ("permute", ((CUBE, [2, 0, 1]), {})),
    ("repeat", ((X, [2, 1]), {})),
    ("reshape", ((X.t(), [3, -1]), {})),
    ("rms_norm", ((X, [6], X[0], None), {})),
    ("scaled_dot_product_attention", ((HEADS, HEADS, HEADS, None, 0.0, True), {})),
    ("scaled_dot_product_attention", ((HEADS, HEADS, HEADS), {"scale": 0.5})),
    ("select.int", ((X, 1, 2), {})),
    ("softmax.int", ((X, 0, torch.float64), {})),
    ("softmax.int", ((X, -1), {})),
    ("squeeze.dim", ((X[:, :1], 1), {})),
    ("stack", (([X, Y], -1), {})),
    ("sum.dim_IntList", ((X, [0, 1], True), {})),
    ("sum.dim_IntList", ((X, []), {})),
    ("sum", ((MASK,), {"dtype": torch.float32})),
    ("to.dtype", ((X, torch.float64), {})),
    ("to.dtype", ((X, torch.float32, False, True), {})),
    ("transpose.int", ((CUBE, 0, -1), {})),
    ("tril", ((X, 1), {})),
    ("triu", ((X, -1), {})),
    ("type_as", ((X, MASK), {})),
    ("unsqueeze", ((X, -1), {})),
    ("var.dim", ((X, [1], False, True), {})),
    ("view", ((X, [2, -1]), {})),
    ("where.self", ((MASK, X, Y), {})),
]


class _DispatchRecorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.dispatched: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves, tree = tree_flatten((args, kwargs or {}))
        self.dispatched.append((func, tree, [_describe(leaf) for leaf in leaves]))
        return func(*args, **(kwargs or {}))


def _describe(leaf: Any) -> Any:
    return (leaf.dtype, tuple(leaf.shape)) if isinstance(leaf, Tensor) else leaf


def _overload(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return operator.attrgetter(f"{packet}.{overload or 'default'}")(torch.ops.aten)


def _record(call: Callable[..., Any], arguments: Arguments) -> tuple[Any, list[Any]]:
    with _DispatchRecorder() as recorder:
        result = call(*arguments[0], **arguments[1])
    return result, recorder.dispatched


@pytest.mark.parametrize(("name", "arguments"), ARGUMENTS, ids=[name for name, _ in ARGUMENTS])
def test_a_python_call_runs_the_op(name: str, arguments: Arguments) -> None:
    op = _overload(name)
    assert python_call(op) is not op
    wanted, expected = _record(op, arguments)
    found, dispatched = _record(python_call(op), arguments)
    assert dispatched == expected
    for result, reference in zip(tree_flatten(found)[0], tree_flatten(wanted)[0], strict=True):
        assert result.stride() == reference.stride()
        assert result.dtype is reference.dtype
        assert torch.equal(result, reference)


def test_every_python_call_is_tried() -> None:
    tried = {name if "." in name else f"{name}.default" for name, _ in ARGUMENTS}
    assert set(PYTHON_CALLS) - tried == set()


def test_an_op_without_a_python_call_is_called_itself() -> None:
    op = torch.ops.aten.gelu_backward.default
    assert python_call(op) is op
    assert python_call(operator.mul) is operator.mul
