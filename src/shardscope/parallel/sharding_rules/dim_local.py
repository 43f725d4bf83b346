"""Ops that work along one dim or a few and leave the others unchanged: sort, flip, pad, tril."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx

from shardscope.parallel.ir.graph import Strategy
from shardscope.parallel.sharding_rules.builders import (
    has_nonempty_shards,
    make_strategy,
    propagate_partial,
    propagate_partial_sum,
    shard_dims,
)
from shardscope.parallel.sharding_rules.context import LoweringContext, OpCall, normalize_dim
from shardscope.parallel.sharding_rules.masking import is_sharded
from shardscope.parallel.sharding_rules.registry import lowering, rule
from shardscope.plan.placements import Shard

aten = torch.ops.aten


def _shard_all_dims_but(call: OpCall, *dims: int) -> Iterator[Strategy]:
    yield from shard_dims(call, "self", call.tensor("self").dims_except(*dims))


@rule(
    aten.topk.default,
    aten.sort.default,
    aten.sort.stable,
    aten.argsort.default,
    aten.argsort.stable,
)
def shard_sort(call: OpCall) -> Iterator[Strategy]:
    yield from _shard_all_dims_but(call, call.dim())


@rule(aten.kthvalue.default)
def shard_kthvalue(call: OpCall) -> Iterator[Strategy]:
    reduced_dim = call.dim()
    for dim in call.tensor("self").dims_except(reduced_dim):
        output_dim = dim if call["keepdim"] else dim - (dim > reduced_dim)
        yield make_strategy(call, {"self": Shard(dim)}, Shard(output_dim))


@rule(aten.flip.default, aten.roll.default)
def shard_flip(call: OpCall) -> Iterator[Strategy]:
    """Every dim that is not flipped or rolled. Without `dims`, roll works on the
    flattened tensor.
    """
    num_dims = call.tensor("self").num_dims
    if call["dims"] or call.op == aten.flip.default:
        yield from _shard_all_dims_but(
            call, *(normalize_dim(dim, num_dims) for dim in call["dims"])
        )
    yield from propagate_partial(call, "self")


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
def shard_pad(call: OpCall) -> Iterator[Strategy]:
    """Every dim that is not padded. `pad` has two amounts for each dim, the last dim first.

    Modes other than "constant" reject empty shards, and treat dims with amounts of 0 as padded.
    """
    padding = call["pad"] if "pad" in call.arguments else call["padding"]
    amounts = list(zip(padding[::2], padding[1::2], strict=True))
    last = call.tensor("self").num_dims - 1
    if _is_constant_pad(call):
        padded_dims = [
            last - index
            for index, before_and_after in enumerate(amounts)
            if any(amount != 0 for amount in before_and_after)
        ]
    else:
        sizes = enumerate(call.tensor("self").shape)
        empty = [dim for dim, size in sizes if not has_nonempty_shards(call, size)]
        padded_dims = [*empty, *(last - index for index in range(len(amounts)))]
    yield from _shard_all_dims_but(call, *padded_dims)
    if not call.arguments.get("value"):
        yield from propagate_partial_sum(call, "self")


def _is_constant_pad(call: OpCall) -> bool:
    is_default = call.op == aten.constant_pad_nd.default
    return is_default or call.arguments.get("mode") == "constant"


@rule(aten.tril.default, aten.triu.default)
def shard_tril_triu(call: OpCall) -> Iterator[Strategy]:
    """Every dim. A rank that holds some rows or columns shifts the diagonal by their offset."""
    num_dims = call.tensor("self").num_dims
    yield from _shard_all_dims_but(call, num_dims - 2, num_dims - 1)
    yield from propagate_partial_sum(call, "self")
    for dim in (num_dims - 2, num_dims - 1):
        if isinstance(call.tensor("self").shape[dim], int):
            yield make_strategy(
                call, {"self": Shard(dim)}, Shard(dim), is_permutation_invariant=False
            )


@lowering(aten.tril.default, aten.triu.default)
def lower_tril_triu(local: LoweringContext) -> fx.Node:
    spec, diagonal = local.input_spec("self"), local["diagonal"]
    rows, columns = len(spec.shape) - 2, len(spec.shape) - 1
    if is_sharded(spec, rows):
        diagonal += spec.start(rows, local.coordinate)
    if is_sharded(spec, columns):
        diagonal -= spec.start(columns, local.coordinate)
    return local.repeat(diagonal=diagonal)


@rule(aten.unfold.default)
def shard_unfold(call: OpCall) -> Iterator[Strategy]:
    yield from _shard_all_dims_but(call, call.dim("dimension"))
    yield from propagate_partial(call, "self")


@rule(aten.diff.default)
def shard_diff(call: OpCall) -> Iterator[Strategy]:
    for dim in call.tensor("self").dims_except(call.dim()):
        yield make_strategy(call, dict.fromkeys(call.tensors, Shard(dim)), Shard(dim))
    yield from propagate_partial_sum(call, *call.tensors)


@rule(aten.isin.Tensor_Tensor, aten.isin.Tensor_Scalar)
def shard_isin(call: OpCall) -> Iterator[Strategy]:
    """Every dim of `elements`; each element is compared with all test elements, so these are
    replicated.
    """
    yield from shard_dims(call, "elements", range(call.tensor("elements").num_dims))


@rule(aten.bucketize.Tensor, aten.searchsorted.Tensor)
def shard_bucketize(call: OpCall) -> Iterator[Strategy]:
    """Every dim of the values if all are compared with the same boundaries; if each row of values
    has its own boundaries, every dim but the last.
    """
    rows = call.tensors.get("sorted_sequence")
    num_dims = call.tensor("self").num_dims
    if rows is None or rows.num_dims <= 1:
        yield from shard_dims(call, "self", range(num_dims))
    else:
        for dim in range(num_dims - 1):
            yield make_strategy(call, dict.fromkeys(call.tensors, Shard(dim)), Shard(dim))
