"""Matrix products, einsum and distances; contractions are described by a label for each dim."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from shardscope.parallel.sharding_rules.builders import (
    can_be_sharded,
    fill_replicated,
    normalize_dim,
    overloads,
    partial_strategy,
    shard_at,
)
from shardscope.parallel.sharding_rules.context import OpCall, Strategy
from shardscope.parallel.sharding_rules.pointwise import broadcast_shards
from shardscope.parallel.sharding_rules.precision import safe_sqrt, to_compute_dtype
from shardscope.parallel.sharding_rules.registry import decomposition, rule
from shardscope.plan.placements import Partial, Placement, Shard, Size

Labels = Sequence[str | None]
"""A name for each dim of a tensor; None for one that is broadcast, which is never cut."""


def contraction_strategies(
    call: OpCall, inputs: Sequence[Labels], output: Labels, *, bias_position: int | None = None
) -> Iterator[Strategy]:
    """Shard along any label: if the result has it, the result is sharded; if it is summed, partial.

    `bias_position` is the position of an input that is added to the product and is not a factor of
    it. If the product is partial, that input must be too, or every rank would add it.
    """
    factors = [position for position in range(len(inputs)) if position != bias_position]
    bias_positions = [] if bias_position is None else [bias_position]
    for label in dict.fromkeys(
        label for factor in factors for label in inputs[factor] if label is not None
    ):
        placements = _placements_of_label(call, inputs, label)
        if placements is None:
            continue
        is_summed = label not in output
        if is_summed:
            placements |= dict.fromkeys(bias_positions, Partial())
        result = Partial() if is_summed else Shard(output.index(label))
        yield Strategy(fill_replicated(placements, len(inputs)), (result,))
    for factor in factors:
        yield partial_strategy(call, factor, *bias_positions)


def broadcast_labels(
    shape: Sequence[Size], output: Labels, broadcast_shape: Sequence[Size]
) -> Labels:
    """The labels of dims that are matched with the result's dims from the back."""
    offset = len(output) - len(shape)
    return [
        output[dim + offset] if size == broadcast_shape[dim + offset] else None
        for dim, size in enumerate(shape)
    ]


def _placements_of_label(
    call: OpCall, inputs: Sequence[Labels], label: str
) -> dict[int, Placement] | None:
    """The placement of each input that has the label, sharded along it; None if it cannot be
    sharded.
    """
    placements: dict[int, Placement] = {}
    for position, labels in enumerate(inputs):
        if list(labels).count(label) > 1:
            return None  # a diagonal: both of its dims would have to be sharded at once
        if label in labels:
            dim = labels.index(label)
            if not can_be_sharded(call.inputs[position].shape[dim]):
                return None
            placements[position] = Shard(dim)
    return placements


aten = torch.ops.aten

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
    yield from contraction_strategies(call, [list(operand) for operand in inputs], list(output))


@rule(*_SUMS)
def shard_addmm(call: OpCall) -> Iterator[Strategy]:
    inputs, output = _SUMS[call.op]
    bias_labels = broadcast_labels(call["self"].shape, list(output), call.outputs[0].shape)
    labels = [bias_labels, *(list(operand) for operand in inputs)]
    yield from contraction_strategies(call, labels, list(output), bias_position=0)


@rule(*overloads("matmul", "linalg_matmul"))
def shard_matmul(call: OpCall) -> Iterator[Strategy]:
    """Dims before the last two are batch dims, matched from the back."""
    left, right = (spec.shape for spec in call.inputs)
    rows, columns = ["m"] * (len(left) > 1), ["n"] * (len(right) > 1)
    sizes = call.outputs[0].shape
    sizes = sizes[: len(sizes) - len(rows) - len(columns)]
    batch = [f"batch {dim}" for dim in range(len(sizes))]
    inputs: list[Labels] = [
        [*broadcast_labels(left[:-2], batch, sizes), *rows, "k"],
        [*broadcast_labels(right[:-2], batch, sizes), "k", *columns],
    ]
    yield from contraction_strategies(call, inputs, [*batch, *rows, *columns])


@rule(aten.linear.default)
def shard_linear(call: OpCall) -> Iterator[Strategy]:
    """Batch dims and features. With a bias, features in are sharded by the decomposition."""
    batch = [f"batch {dim}" for dim in range(call["input"].num_dims - 1)]
    features = ["out"] * (call["weight"].num_dims - 1)
    inputs: list[Labels] = [[*batch, "in"], [*features, "in"]]
    if call["bias"] is None:
        yield from contraction_strategies(call, inputs, [*batch, *features])
    else:
        yield from contraction_strategies(
            call, [*inputs, features], [*batch, *features], bias_position=2
        )


@rule(aten.inner.default)
def shard_inner(call: OpCall) -> Iterator[Strategy]:
    num_left, num_right = (spec.num_dims for spec in call.inputs)
    if num_left and num_right:  # else it multiplies by a scalar
        left = [f"left {dim}" for dim in range(num_left - 1)]
        right = [f"right {dim}" for dim in range(num_right - 1)]
        yield from contraction_strategies(call, [[*left, "k"], [*right, "k"]], [*left, *right])


@rule(aten.tensordot.default)
def shard_tensordot(call: OpCall) -> Iterator[Strategy]:
    left = [f"left {dim}" for dim in range(call["self"].num_dims)]
    right = [f"right {dim}" for dim in range(call["other"].num_dims)]
    for left_dim, right_dim in zip(call["dims_self"], call["dims_other"], strict=True):
        label = f"summed {normalize_dim(left_dim, len(left))}"
        left[normalize_dim(left_dim, len(left))] = right[normalize_dim(right_dim, len(right))] = (
            label
        )
    output = [label for label in (*left, *right) if not label.startswith("summed")]
    yield from contraction_strategies(call, [left, right], output)


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


@rule(torch.ops.aten.einsum.default)
def shard_einsum(call: OpCall) -> Iterator[Strategy]:
    """Every label: of the result, which is then sharded, or summed, which makes the
    result partial.
    """
    shapes = [spec.shape for spec in call.inputs]
    names, output = _parse_equation(call["equation"], [len(shape) for shape in shapes])
    sizes = _label_sizes(names, shapes)
    labels: list[Labels] = [
        [
            name if size == sizes[name] else None
            for name, size in zip(operand_names, shape, strict=True)
        ]
        for operand_names, shape in zip(names, shapes, strict=True)
    ]
    yield from contraction_strategies(call, labels, output)


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
    broadcast_shape = _broadcast_shape(call)
    reduced_dim = normalize_dim(call.arguments.get("dim", -1), len(broadcast_shape))
    has_keepdim = call.arguments.get("keepdim", False)
    for dim, inputs in broadcast_shards(call, broadcast_shape):
        if dim != reduced_dim:
            yield shard_at(call, inputs, {0: dim if has_keepdim or dim < reduced_dim else dim - 1})


@rule(aten.linalg_cross.default)
def shard_cross(call: OpCall) -> Iterator[Strategy]:
    output_shape = call.outputs[0].shape
    for dim, inputs in broadcast_shards(call, output_shape):
        if dim != normalize_dim(call["dim"], len(output_shape)):
            yield shard_at(call, inputs, {0: dim})


@rule(aten.cdist.default)
def shard_cdist(call: OpCall) -> Iterator[Strategy]:
    """Rows with rows: dims before the last two are batch dims, matched from the back."""
    output_shape = call.outputs[0].shape
    batch = [f"batch {dim}" for dim in range(len(output_shape) - 2)]
    names = [
        [*_batch_labels(spec.shape, batch, output_shape), row_label, None]
        for spec, row_label in zip(call.inputs, ("left", "right"), strict=True)
    ]
    for dim, name in enumerate([*batch, "left", "right"]):
        inputs = {at: labels.index(name) for at, labels in enumerate(names) if name in labels}
        if can_be_sharded(output_shape[dim]):
            yield shard_at(call, inputs, {0: dim})


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


def _broadcast_shape(call: OpCall) -> list[Size]:
    """The shape that both inputs are broadcast to."""
    shapes = [spec.shape for spec in call.inputs]
    max_dims = max(len(shape) for shape in shapes)
    padded = [(1,) * (max_dims - len(shape)) + tuple(shape) for shape in shapes]
    return [
        right_size if left_size == 1 else left_size
        for left_size, right_size in zip(*padded, strict=True)
    ]


def _batch_labels(shape: Sequence[Size], batch: Labels, output_shape: Sequence[Size]) -> Labels:
    return broadcast_labels(shape[:-2], batch, output_shape[:-2])
