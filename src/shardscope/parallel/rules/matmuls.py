"""Matrix products in all their spellings: linear, matmul, mm, bmm, addmm, outer and their like."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from shardscope.parallel.rules.book import decomposition, rule
from shardscope.parallel.rules.call import Call, Strategy
from shardscope.parallel.rules.contractions import (
    Labels,
    broadcast_labels,
    contraction_strategies,
)
from shardscope.parallel.rules.dims import overloads, wrap

__all__ = [
    "inners",
    "linears",
    "matmuls",
    "products",
    "products_added_to_something",
    "take_addbmm_apart",
    "take_addmm_apart",
    "take_addmv_apart",
    "take_addr_apart",
    "take_baddbmm_apart",
    "take_linear_apart",
    "tensordots",
]

_aten = torch.ops.aten

_PRODUCTS = {
    _aten.mm.default: (["mk", "kn"], "mn"),
    _aten.bmm.default: (["bmk", "bkn"], "bmn"),
    _aten.mv.default: (["mk", "k"], "m"),
    _aten.dot.default: (["k", "k"], ""),
    _aten.vdot.default: (["k", "k"], ""),
    _aten.outer.default: (["m", "n"], "mn"),
    _aten.ger.default: (["m", "n"], "mn"),
}
_SUMS = {
    _aten.addmm.default: (["mk", "kn"], "mn"),
    _aten.baddbmm.default: (["bmk", "bkn"], "bmn"),
    _aten.addbmm.default: (["bmk", "bkn"], "mn"),
    _aten.addmv.default: (["mk", "k"], "m"),
    _aten.addr.default: (["m", "n"], "mn"),
}


@rule(*_PRODUCTS)
def products(call: Call) -> Iterator[Strategy]:
    inputs, output = _PRODUCTS[call.op]
    yield from contraction_strategies(call, [list(one) for one in inputs], list(output))


@rule(*_SUMS)
def products_added_to_something(call: Call) -> Iterator[Strategy]:
    inputs, output = _SUMS[call.op]
    added = broadcast_labels(call["self"].shape, list(output), call.outputs[0].shape)
    labels = [added, *(list(one) for one in inputs)]
    yield from contraction_strategies(call, labels, list(output), added=0)


@rule(*overloads("matmul", "linalg_matmul"))
def matmuls(call: Call) -> Iterator[Strategy]:
    """Dims before the last two are batches, matched from the back."""
    left, right = (one.shape for one in call.inputs)
    rows, columns = ["m"] * (len(left) > 1), ["n"] * (len(right) > 1)
    sizes = call.outputs[0].shape
    sizes = sizes[: len(sizes) - len(rows) - len(columns)]
    batch = [f"batch {dim}" for dim in range(len(sizes))]
    inputs: list[Labels] = [
        [*broadcast_labels(left[:-2], batch, sizes), *rows, "k"],
        [*broadcast_labels(right[:-2], batch, sizes), "k", *columns],
    ]
    yield from contraction_strategies(call, inputs, [*batch, *rows, *columns])


@rule(_aten.linear.default)
def linears(call: Call) -> Iterator[Strategy]:
    """A weight of features out and in. With a bias, features in are cut by its decomposition."""
    batch = [f"batch {dim}" for dim in range(call["input"].num_dims - 1)]
    features = ["out"] * (call["weight"].num_dims - 1)
    inputs: list[Labels] = [[*batch, "in"], [*features, "in"]]
    if call["bias"] is None:
        yield from contraction_strategies(call, inputs, [*batch, *features])
    else:
        yield from contraction_strategies(call, [*inputs, features], [*batch, *features], added=2)


@rule(_aten.inner.default)
def inners(call: Call) -> Iterator[Strategy]:
    num_left, num_right = (one.num_dims for one in call.inputs)
    if num_left and num_right:  # else it multiplies by a number
        left = [f"left {dim}" for dim in range(num_left - 1)]
        right = [f"right {dim}" for dim in range(num_right - 1)]
        yield from contraction_strategies(call, [[*left, "k"], [*right, "k"]], [*left, *right])


@rule(_aten.tensordot.default)
def tensordots(call: Call) -> Iterator[Strategy]:
    left = [f"left {dim}" for dim in range(call["self"].num_dims)]
    right = [f"right {dim}" for dim in range(call["other"].num_dims)]
    for one, other in zip(call["dims_self"], call["dims_other"], strict=True):
        name = f"summed {wrap(one, len(left))}"
        left[wrap(one, len(left))] = right[wrap(other, len(right))] = name
    output = [name for name in (*left, *right) if not name.startswith("summed")]
    yield from contraction_strategies(call, [left, right], output)


@decomposition(_aten.linear.default)
def take_linear_apart(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The bias is added once, after the addends of the product are one."""
    if bias is None:
        return input @ weight.t()
    return torch.nn.functional.linear(input, weight) + bias


@decomposition(_aten.addmm.default)
def take_addmm_apart(
    self: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float = 1, alpha: float = 1
) -> Tensor:
    return _weigh(self, beta, torch.mm(mat1, mat2), alpha)


@decomposition(_aten.addmv.default)
def take_addmv_apart(
    self: Tensor, mat: Tensor, vec: Tensor, *, beta: float = 1, alpha: float = 1
) -> Tensor:
    return _weigh(self, beta, torch.mv(mat, vec), alpha)


@decomposition(_aten.baddbmm.default)
def take_baddbmm_apart(
    self: Tensor, batch1: Tensor, batch2: Tensor, *, beta: float = 1, alpha: float = 1
) -> Tensor:
    return _weigh(self, beta, torch.bmm(batch1, batch2), alpha)


@decomposition(_aten.addbmm.default)
def take_addbmm_apart(
    self: Tensor, batch1: Tensor, batch2: Tensor, *, beta: float = 1, alpha: float = 1
) -> Tensor:
    return _weigh(self, beta, torch.bmm(batch1, batch2).sum(0), alpha)


@decomposition(_aten.addr.default)
def take_addr_apart(
    self: Tensor, vec1: Tensor, vec2: Tensor, *, beta: float = 1, alpha: float = 1
) -> Tensor:
    return _weigh(self, beta, torch.outer(vec1, vec2), alpha)


def _weigh(addend: Tensor, beta: float, whole: Tensor, alpha: float) -> Tensor:
    weighted = whole if alpha == 1 else whole * alpha
    if beta == 0:
        return weighted  # what is added then does not count, not even if it is not a number
    return weighted + (addend if beta == 1 else addend * beta)
