"""Scatter and embedding lookups."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx

from shardscope._torch.dispatch import private_aten_op
from shardscope.parallel.ir.graph import Strategy
from shardscope.parallel.sharding_rules.builders import (
    can_be_partial_sum,
    make_strategy,
    propagate_partial_sum,
    shard_dims,
)
from shardscope.parallel.sharding_rules.context import LoweringContext, OpCall, TensorSpec
from shardscope.parallel.sharding_rules.masking import (
    is_sharded,
    localize_indices,
    write_zeros,
    zero_except_first_rank,
)
from shardscope.parallel.sharding_rules.registry import lowering, rule
from shardscope.plan.placements import Partial, Replicate, Shard

aten = torch.ops.aten

_LINEAR = (aten.scatter.src, aten.scatter_add.default)


@rule(
    aten.scatter.src,
    aten.scatter.value,
    aten.scatter.reduce,
    aten.scatter.value_reduce,
    aten.scatter_add.default,
    aten.scatter_reduce.two,
)
def shard_scatter(call: OpCall) -> Iterator[Strategy]:
    """Dims that are not indexed match elementwise, so all tensors must have the same size there."""
    specs, indexed_dim = call.tensors.values(), call.dim()
    if len({spec.num_dims for spec in specs}) > 1:
        return
    for dim in call.tensor("self").dims_except(indexed_dim):
        if len({spec.shape[dim] for spec in specs}) == 1:
            yield make_strategy(call, dict.fromkeys(call.tensors, Shard(dim)), Shard(dim))
    if call.op in _LINEAR:
        yield from propagate_partial_sum(call, "self", "src")
    if call.op == aten.scatter_add.default and _can_add_to_shards(call.tensor("self")):
        yield from _shard_additions(call, indexed_dim)


def _can_add_to_shards(target: TensorSpec) -> bool:
    """Whether ranks can add different values to `target`; torch also adds to scalars."""
    return target.num_dims > 0 and can_be_partial_sum(target)


def _shard_additions(call: OpCall, indexed_dim: int) -> Iterator[Strategy]:
    """Shard the values that are added: ranks may add different ones, which gives partial sums."""
    if call.tensor("index").shape[indexed_dim] == call.tensor("src").shape[indexed_dim]:
        shard = Shard(indexed_dim)
        for target in (Replicate(), Partial()):
            yield make_strategy(call, {"self": target, "index": shard, "src": shard}, Partial())


@rule(aten.index_add.default, aten.index_copy.default)
def shard_index_add(call: OpCall) -> Iterator[Strategy]:
    target, source, indexed_dim = call.tensor("self"), call.tensor("source"), call.dim()
    if source.num_dims != target.num_dims or call.tensor("index").num_dims != 1:
        return
    for dim in target.dims_except(indexed_dim):
        yield make_strategy(call, {"self": Shard(dim), "source": Shard(dim)}, Shard(dim))
    yield from propagate_partial_sum(call, "self", "source")
    if call.op == aten.index_add.default and _can_add_to_shards(target):
        for target_placement in (Replicate(), Partial()):
            placements = {"self": target_placement, "index": Shard(0), "source": Shard(indexed_dim)}
            yield make_strategy(call, placements, Partial())


@lowering(aten.scatter_add.default, aten.index_add.default)
def lower_scatter_add(local: LoweringContext) -> fx.Node:
    return local.repeat(self=zero_except_first_rank(local, "self"))


@rule(aten.index_fill.int_Scalar, aten.index_fill.int_Tensor)
def shard_index_fill(call: OpCall) -> Iterator[Strategy]:
    yield from shard_dims(call, "self", call.tensor("self").dims_except(call.dim()))


@rule(aten.embedding.default)
def shard_embedding(call: OpCall) -> Iterator[Strategy]:
    if call["sparse"]:
        return  # collectives do not sum sparse gradients
    num_dims = call.outputs[0].num_dims
    yield make_strategy(call, {"weight": Shard(1)}, Shard(num_dims - 1))
    yield make_strategy(call, {"weight": Partial()}, Partial())
    if call["scale_grad_by_freq"] and call.is_training:
        return  # only a rank that sees all indices knows how often each occurs
    yield make_strategy(call, {"weight": Shard(0)}, Partial(), is_permutation_invariant=False)
    yield from shard_dims(call, "indices", range(call.tensor("indices").num_dims))


@lowering(aten.embedding.default)
def lower_embedding(local: LoweringContext) -> fx.Node:
    """With sharded rows, look up the rank's own rows and write zeros for the rest."""
    table = local.input_spec("weight")
    if not is_sharded(table, 0):
        return local.repeat()
    num_rows = table.local_shape(local.coordinate)[0]
    if num_rows == 0:
        return write_zeros(local, local["weight"])
    local_indices, is_remote = localize_indices(local, local["indices"], spec=table, dim=0)
    padding = local["padding_idx"] - table.start(0, local.coordinate)
    padding = padding if local["padding_idx"] >= 0 and 0 <= padding < num_rows else -1
    rows = local.repeat(indices=local_indices, padding_idx=padding)
    mask = local.builder.write(aten.unsqueeze.default, is_remote, -1)
    return local.builder.write(aten.masked_fill.Scalar, rows, mask, 0)


@rule(
    aten.embedding_bag.default,
    aten.embedding_bag.padding_idx,
    private_aten_op("embedding_bag"),
    private_aten_op("embedding_bag_forward_only"),
)
def shard_embedding_bag(call: OpCall) -> Iterator[Strategy]:
    """Columns, for sums and means. Maxima also return the indices where they occur."""
    is_sum_or_mean = call["mode"] in (0, 1)
    if is_sum_or_mean and not call["sparse"]:
        rest = [Replicate()] * (len(call.outputs) - 1)
        yield make_strategy(call, {"weight": Shard(1)}, [Shard(1), *rest])


@rule(aten.one_hot.default)
def shard_onehot(call: OpCall) -> Iterator[Strategy]:
    if call["num_classes"] < 0:
        return  # the number of classes depends on the largest index on any rank
    yield from shard_dims(call, "self", range(call.tensor("self").num_dims))
