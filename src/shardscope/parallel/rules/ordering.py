"""Ops that work along one dim or a few, and leave the others alone: sorting, flipping, padding."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import torch

from shardscope.parallel.placements import Shard
from shardscope.parallel.rules.book import rule, speller
from shardscope.parallel.rules.call import Call, Strategy, tensors_in
from shardscope.parallel.rules.dims import wrap
from shardscope.parallel.rules.local import Local
from shardscope.parallel.rules.pieces import is_cut
from shardscope.parallel.rules.terms import keep_terms, lay, leaves_some, pass_terms

__all__ = [
    "cut_bucketize",
    "cut_diff",
    "cut_flip",
    "cut_isin",
    "cut_kthvalue",
    "cut_padded",
    "cut_sorted",
    "cut_triangle",
    "cut_unfold",
    "spell_triangle",
]

aten = torch.ops.aten


def _cut_all_but(call: Call, dims: Collection[int]) -> Iterator[Strategy]:
    for dim in range(call["self"].num_dims):
        if dim not in dims:
            yield lay(call, {"self": Shard(dim)}, Shard(dim))


def _dim(call: Call, name: str = "dim") -> int:
    return wrap(call[name], call["self"].num_dims)


@rule(
    aten.topk.default,
    aten.sort.default,
    aten.sort.stable,
    aten.argsort.default,
    aten.argsort.stable,
)
def cut_sorted(call: Call) -> Iterator[Strategy]:
    yield from _cut_all_but(call, [_dim(call)])


@rule(aten.kthvalue.default)
def cut_kthvalue(call: Call) -> Iterator[Strategy]:
    gone = _dim(call)
    for dim in range(call["self"].num_dims):
        if dim != gone:
            kept = dim if call["keepdim"] else dim - (dim > gone)
            yield lay(call, {"self": Shard(dim)}, Shard(kept))


@rule(aten.flip.default, aten.roll.default)
def cut_flip(call: Call) -> Iterator[Strategy]:
    """A roll that names no dims rolls the flattened tensor."""
    num_dims = call["self"].num_dims
    if call["dims"] or call.op == aten.flip.default:
        yield from _cut_all_but(call, [wrap(one, num_dims) for one in call["dims"]])
    yield from keep_terms(call, "self")


_PADS = (
    aten.constant_pad_nd.default,
    aten.pad.default,
    aten.reflection_pad1d.default,
    aten.reflection_pad2d.default,
    aten.reflection_pad3d.default,
    aten.replication_pad1d.default,
    aten.replication_pad2d.default,
    aten.replication_pad3d.default,
)


@rule(*_PADS)
def cut_padded(call: Call) -> Iterator[Strategy]:
    """Dims are padded from the last; one that a non-constant mode names counts as padded."""
    padding = call["pad"] if "pad" in call.arguments else call["padding"]
    pairs = list(zip(padding[::2], padding[1::2], strict=True))
    last = call["self"].num_dims - 1
    if _pads_with_a_number(call):
        left = [last - index for index, pair in enumerate(pairs) if any(one != 0 for one in pair)]
    else:
        sizes = enumerate(call["self"].shape)
        empty = [dim for dim, size in sizes if not leaves_some(call, size)]
        left = [*empty, *(last - index for index in range(len(pairs)))]
    yield from _cut_all_but(call, left)
    if not call.arguments.get("value"):
        yield from pass_terms(call, "self")


def _pads_with_a_number(call: Call) -> bool:
    is_default = call.op == aten.constant_pad_nd.default
    return is_default or call.arguments.get("mode") == "constant"


@rule(aten.tril.default, aten.triu.default)
def cut_triangle(call: Call) -> Iterator[Strategy]:
    """A rank that holds some rows, or some columns, moves the diagonal by where they begin."""
    num_dims = call["self"].num_dims
    yield from _cut_all_but(call, [num_dims - 2, num_dims - 1])
    yield from pass_terms(call, "self")
    for dim in (num_dims - 2, num_dims - 1):
        if isinstance(call["self"].shape[dim], int):
            yield lay(call, {"self": Shard(dim)}, Shard(dim), is_order_blind=False)


@speller(aten.tril.default, aten.triu.default)
def spell_triangle(local: Local) -> Any:
    layout, diagonal = local.input_layout("self"), local["diagonal"]
    rows, columns = len(layout.shape) - 2, len(layout.shape) - 1
    if is_cut(layout, rows):
        diagonal += layout.start(rows, local.seat)
    if is_cut(layout, columns):
        diagonal -= layout.start(columns, local.seat)
    return local.repeat(diagonal=diagonal)


@rule(aten.unfold.default)
def cut_unfold(call: Call) -> Iterator[Strategy]:
    yield from _cut_all_but(call, [_dim(call, "dimension")])
    yield from keep_terms(call, "self")


@rule(aten.diff.default)
def cut_diff(call: Call) -> Iterator[Strategy]:
    along, names = _dim(call), ("self", "prepend", "append")
    given = [name for name in names if call[name] is not None]
    for dim in range(call["self"].num_dims):
        if dim != along:
            yield lay(call, dict.fromkeys(given, Shard(dim)), Shard(dim))
    yield from pass_terms(call, *given)


@rule(aten.isin.Tensor_Tensor, aten.isin.Tensor_Scalar)
def cut_isin(call: Call) -> Iterator[Strategy]:
    """Each element against all that it may be."""
    for dim in range(call["elements"].num_dims):
        yield lay(call, {"elements": Shard(dim)}, Shard(dim))


@rule(aten.bucketize.Tensor, aten.searchsorted.Tensor)
def cut_bucketize(call: Call) -> Iterator[Strategy]:
    """Any values against one row of boundaries; or each row of values with its own."""
    rows = call.arguments.get("sorted_sequence")
    is_rowwise = rows is not None and rows.num_dims > 1
    num_dims = call["self"].num_dims
    for dim in range(num_dims - 1 if is_rowwise else num_dims):
        cuts = {"self": Shard(dim)}
        if is_rowwise:
            cuts["sorted_sequence"] = Shard(dim)
            if any(tensors_in([call["sorter"]])):
                cuts["sorter"] = Shard(dim)
        yield lay(call, cuts, Shard(dim))
