"""Matrix products, einsum and distances; contractions are described by a label for each dim."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from shardscope.parallel.ir.graph import Strategy
from shardscope.parallel.sharding_rules.builders import (
    broadcast_shape,
    broadcast_shards,
    can_be_sharded,
    make_strategy,
    overloads,
    safe_sqrt,
    to_compute_dtype,
)
from shardscope.parallel.sharding_rules.context import OpCall, normalize_dim
from shardscope.parallel.sharding_rules.registry import decomposition, rule
from shardscope.plan.placements import Partial, Placement, Replicate, Shard, Size

aten = torch.ops.aten

Labels = Sequence[str | None]
"""A name for each dim of a tensor, as in einsum; None for a dim that is broadcast, which is never
sharded.
"""

_Operand = TypeVar("_Operand", str, int)  # an argument's name, or a position in a list of tensors


def contraction_strategies(
    call: OpCall, labels: Mapping[str, Labels], output: Labels, *, bias: str | None = None
) -> Iterator[Strategy]:
    """Strategies of a product that is summed over the labels that `output` does not have.

    For each label, all tensors that have it are sharded along it: if the output has the label, it
    is sharded too, otherwise it is partial. And each factor may be partial. `labels` are those of
    each tensor argument by name. `bias` names an argument that is added to the product: where the
    output is partial, so must the bias be, or every rank would add it.
    """
    shapes = {name: call.tensor(name).shape for name in labels}
    for placements, result in _contract(shapes, labels, output, bias):
        yield make_strategy(call, placements, result)


def _contract(
    shapes: Mapping[_Operand, Sequence[Size]],
    labels: Mapping[_Operand, Labels],
    output: Labels,
    bias: _Operand | None = None,
) -> Iterator[tuple[dict[_Operand, Placement], Placement]]:
    """The placements of operands and of the output of each strategy; other operands are
    replicated.
    """
    factors = [operand for operand in labels if operand != bias]
    names = [label for factor in factors for label in labels[factor] if label is not None]
    for label in dict.fromkeys(names):
        placements = _shard_label(shapes, labels, label)
        if placements is None:
            continue
        is_summed = label not in output
        if is_summed and bias is not None:
            placements[bias] = Partial()
        yield placements, Partial() if is_summed else Shard(output.index(label))
    for factor in factors:
        partial_operands = [factor] if bias is None else [factor, bias]
        yield dict.fromkeys(partial_operands, Partial()), Partial()


def _shard_label(
    shapes: Mapping[_Operand, Sequence[Size]], labels: Mapping[_Operand, Labels], label: str
) -> dict[_Operand, Placement] | None:
    """The placement of each operand that has the label, sharded along it; None if it cannot be
    sharded.
    """
    placements: dict[_Operand, Placement] = {}
    for operand, names in labels.items():
        if list(names).count(label) > 1:
            return None  # a diagonal: both of its dims would have to be sharded at once
        if label in names:
            dim = names.index(label)
            if not can_be_sharded(shapes[operand][dim]):
                return None
            placements[operand] = Shard(dim)
    return placements


def broadcast_labels(shape: Sequence[Size], output: Labels, output_shape: Sequence[Size]) -> Labels:
    """The labels of a tensor that is broadcast to `output_shape`, whose dims have the labels
    `output`.
    """
    offset = len(output) - len(shape)
    return [
        output[dim + offset] if size == output_shape[dim + offset] else None
        for dim, size in enumerate(shape)
    ]


_PRODUCTS = {
    aten.mm.default: (["mk", "kn"], "mn"),
    aten.bmm.default: (["bmk", "bkn"], "bmn"),
    aten.mv.default: (["mk", "k"], "m"),
    aten.dot.default: (["k", "k"], ""),
    aten.vdot.default: (["k", "k"], ""),
    aten.outer.default: (["m", "n"], "mn"),
    aten.ger.default: (["m", "n"], "mn"),
}
_SUMS = {
    aten.addmm.default: (["mk", "kn"], "mn"),
    aten.baddbmm.default: (["bmk", "bkn"], "bmn"),
    aten.addbmm.default: (["bmk", "bkn"], "mn"),
    aten.addmv.default: (["mk", "k"], "m"),
    aten.addr.default: (["m", "n"], "mn"),
}


@rule(*_PRODUCTS)
def shard_mm(call: OpCall) -> Iterator[Strategy]:
    inputs, output = _PRODUCTS[call.op]
    labels = dict(zip(call.tensors, inputs, strict=True))
    yield from contraction_strategies(call, labels, output)


@rule(*_SUMS)
def shard_addmm(call: OpCall) -> Iterator[Strategy]:
    inputs, output = _SUMS[call.op]
    bias_labels = broadcast_labels(call.tensor("self").shape, output, call.outputs[0].shape)
    labels = dict(zip(call.tensors, [bias_labels, *inputs], strict=True))
    yield from contraction_strategies(call, labels, output, bias="self")


@rule(*overloads("matmul", "linalg_matmul"))
def shard_matmul(call: OpCall) -> Iterator[Strategy]:
    """Dims before the last two are batch dims, matched from the back."""
    left, right = call.tensor("self").shape, call.tensor("other").shape
    rows, columns = ["m"] * (len(left) > 1), ["n"] * (len(right) > 1)
    sizes = call.outputs[0].shape
    sizes = sizes[: len(sizes) - len(rows) - len(columns)]
    batch = [f"batch {dim}" for dim in range(len(sizes))]
    labels: dict[str, Labels] = {
        "self": [*broadcast_labels(left[:-2], batch, sizes), *rows, "k"],
        "other": [*broadcast_labels(right[:-2], batch, sizes), "k", *columns],
    }
    yield from contraction_strategies(call, labels, [*batch, *rows, *columns])


@rule(aten.linear.default)
def shard_linear(call: OpCall) -> Iterator[Strategy]:
    """Batch dims and features. With a bias, features in are sharded by the decomposition."""
    batch = [f"batch {dim}" for dim in range(call.tensor("input").num_dims - 1)]
    features = ["out"] * (call.tensor("weight").num_dims - 1)
    output = [*batch, *features]
    labels: dict[str, Labels] = {"input": [*batch, "in"], "weight": [*features, "in"]}
    if call["bias"] is None:
        yield from contraction_strategies(call, labels, output)
    else:
        yield from contraction_strategies(call, {**labels, "bias": features}, output, bias="bias")


@rule(aten.inner.default)
def shard_inner(call: OpCall) -> Iterator[Strategy]:
    num_left, num_right = call.tensor("self").num_dims, call.tensor("other").num_dims
    if num_left and num_right:  # else it multiplies by a scalar
        left = [f"left {dim}" for dim in range(num_left - 1)]
        right = [f"right {dim}" for dim in range(num_right - 1)]
        labels = {"self": [*left, "k"], "other": [*right, "k"]}
        yield from contraction_strategies(call, labels, [*left, *right])


@rule(aten.tensordot.default)
def shard_tensordot(call: OpCall) -> Iterator[Strategy]:
    left = [f"left {dim}" for dim in range(call.tensor("self").num_dims)]
    right = [f"right {dim}" for dim in range(call.tensor("other").num_dims)]
    for left_dim, right_dim in zip(call["dims_self"], call["dims_other"], strict=True):
        label = f"summed {normalize_dim(left_dim, len(left))}"
        left[normalize_dim(left_dim, len(left))] = right[normalize_dim(right_dim, len(right))] = (
            label
        )
    output = [label for label in (*left, *right) if not label.startswith("summed")]
    yield from contraction_strategies(call, {"self": left, "other": right}, output)


@decomposition(aten.linear.default)
def decompose_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The product and the bias apart, so that the bias is added once, after the partial sums are
    reduced.
    """
    if bias is None:
        return input @ weight.t()
    return torch.nn.functional.linear(input, weight) + bias


@decomposition(aten.addmm.default)
def decompose_addmm(
    self: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float = 1, alpha: float = 1
) -> Tensor:
    return _scaled_sum(self, beta, torch.mm(mat1, mat2), alpha)


@decomposition(aten.addmv.default)
def decompose_addmv(
    self: Tensor, mat: Tensor, vec: Tensor, *, beta: float = 1, alpha: float = 1
) -> Tensor:
    return _scaled_sum(self, beta, torch.mv(mat, vec), alpha)


@decomposition(aten.baddbmm.default)
def decompose_baddbmm(
    self: Tensor, batch1: Tensor, batch2: Tensor, *, beta: float = 1, alpha: float = 1
) -> Tensor:
    return _scaled_sum(self, beta, torch.bmm(batch1, batch2), alpha)


@decomposition(aten.addbmm.default)
def decompose_addbmm(
    self: Tensor, batch1: Tensor, batch2: Tensor, *, beta: float = 1, alpha: float = 1
) -> Tensor:
    return _scaled_sum(self, beta, torch.bmm(batch1, batch2).sum(0), alpha)


@decomposition(aten.addr.default)
def decompose_addr(
    self: Tensor, vec1: Tensor, vec2: Tensor, *, beta: float = 1, alpha: float = 1
) -> Tensor:
    return _scaled_sum(self, beta, torch.outer(vec1, vec2), alpha)


def _scaled_sum(bias: Tensor, beta: float, product: Tensor, alpha: float) -> Tensor:
    weighted = product if alpha == 1 else product * alpha
    if beta == 0:
        return weighted  # the bias is ignored then, even if it is nan
    return weighted + (bias if beta == 1 else bias * beta)


@rule(aten.einsum.default)
def shard_einsum(call: OpCall) -> Iterator[Strategy]:
    """Every label: of the result, which is then sharded, or summed, which makes the
    result partial.
    """
    shapes = [spec.shape for spec in call.inputs]
    names, output = _parse_equation(call["equation"], [len(shape) for shape in shapes])
    sizes = _label_sizes(names, shapes)
    labels = [
        [
            name if size == sizes[name] else None
            for name, size in zip(operand_names, shape, strict=True)
        ]
        for operand_names, shape in zip(names, shapes, strict=True)
    ]
    for placements, result in _contract(dict(enumerate(shapes)), dict(enumerate(labels)), output):
        operand_placements = [placements.get(at, Replicate()) for at in range(len(shapes))]
        yield make_strategy(call, {"tensors": operand_placements}, result)


def _parse_equation(
    equation: str, operand_ranks: Sequence[int]
) -> tuple[list[list[str]], list[str]]:
    """The labels of each operand's dims, and of the result's."""
    left, arrow, right = equation.replace(" ", "").partition("->")
    operands = left.split(",")
    num_more = [
        num_dims - len(operand.replace("...", ""))
        for operand, num_dims in zip(operands, operand_ranks, strict=True)
    ]
    most = max(
        (num for operand, num in zip(operands, num_more, strict=True) if "..." in operand),
        default=0,
    )
    names = [
        _expand_ellipsis(operand, [f"...{dim}" for dim in range(most - num, most)])
        for operand, num in zip(operands, num_more, strict=True)
    ]
    shared = [f"...{dim}" for dim in range(most)]
    return names, _expand_ellipsis(right, shared) if arrow else [*shared, *_implicit_output(left)]


def _expand_ellipsis(operand: str, unnamed: list[str]) -> list[str]:
    """A label for each dim; `unnamed` are those of the ellipsis."""
    before, dots, after = operand.partition("...")
    return [*before, *(unnamed if dots else []), *after]


def _implicit_output(operands: str) -> list[str]:
    """Without an arrow, the result has each letter that occurs once, in alphabetical order."""
    counts = Counter(letter for letter in operands if letter.isalpha())
    return sorted(letter for letter, count in counts.items() if count == 1)


def _label_sizes(
    names: Sequence[Sequence[str]], shapes: Sequence[Sequence[Size]]
) -> dict[str, Size]:
    """The size of each label; a label of size 1 in one operand may be larger in another."""
    sizes: dict[str, Size] = {}
    for operand_names, shape in zip(names, shapes, strict=True):
        for name, size in zip(operand_names, shape, strict=True):
            if sizes.get(name, 1) == 1:
                sizes[name] = size
    return sizes


@rule(aten.cosine_similarity.default, aten.pairwise_distance.default)
def shard_pairwise(call: OpCall) -> Iterator[Strategy]:
    """Every dim but the one that the vectors are along."""
    shape = broadcast_shape(call.tensor("x1").shape, call.tensor("x2").shape)
    reduced_dim = normalize_dim(call.arguments.get("dim", -1), len(shape))
    has_keepdim = call.arguments.get("keepdim", False)
    for dim, placements in broadcast_shards(call, shape):
        if dim != reduced_dim:
            output_dim = dim if has_keepdim or dim < reduced_dim else dim - 1
            yield make_strategy(call, placements, Shard(output_dim))


@rule(aten.linalg_cross.default)
def shard_cross(call: OpCall) -> Iterator[Strategy]:
    output = call.outputs[0]
    for dim, placements in broadcast_shards(call, output.shape):
        if dim != normalize_dim(call["dim"], output.num_dims):
            yield make_strategy(call, placements, Shard(dim))


@rule(aten.cdist.default)
def shard_cdist(call: OpCall) -> Iterator[Strategy]:
    """Rows with rows: dims before the last two are batch dims, matched from the back."""
    output_shape = call.outputs[0].shape
    batch = [f"batch {dim}" for dim in range(len(output_shape) - 2)]
    labels = {
        name: [*broadcast_labels(spec.shape[:-2], batch, output_shape[:-2]), name, None]
        for name, spec in call.tensors.items()
    }
    for dim, label in enumerate([*batch, "x1", "x2"]):
        placements = {
            name: Shard(names.index(label)) for name, names in labels.items() if label in names
        }
        if can_be_sharded(output_shape[dim]):
            yield make_strategy(call, placements, Shard(dim))


@decomposition(aten.cosine_similarity.default)
def decompose_cosine_similarity(x1: Tensor, x2: Tensor, dim: int = 1, eps: float = 1e-8) -> Tensor:
    shape = torch.broadcast_shapes(x1.shape, x2.shape)  # type: ignore[no-untyped-call]
    left, right = (to_compute_dtype(tensor).expand(shape) for tensor in (x1, x2))
    lengths = [safe_sqrt((tensor * tensor).sum(dim)).clamp_min(eps) for tensor in (left, right)]
    similarity = (left * right).sum(dim) / (lengths[0] * lengths[1])
    return similarity.to(x1.dtype) if x1.dtype == x2.dtype else similarity


@decomposition(aten.pairwise_distance.default)
def decompose_pairwise_distance(
    x1: Tensor, x2: Tensor, p: float = 2, eps: float = 1e-6, keepdim: bool = False
) -> Tensor:
    distance: Tensor = torch.linalg.vector_norm(x1 - x2 + eps, p, -1, keepdim)
    return distance


@decomposition(aten.dist.default)
def decompose_dist(self: Tensor, other: Tensor, p: float = 2) -> Tensor:
    distance: Tensor = torch.linalg.vector_norm(self - other, p)
    return distance
