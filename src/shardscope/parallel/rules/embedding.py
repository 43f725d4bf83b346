"""Tables of vectors: cut by what is looked up, by columns, or by rows (the vocabulary)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from shardscope._torch.inner_ops import inner_op
from shardscope.parallel.placements import Partial, Replicate, Shard
from shardscope.parallel.rules.book import rule, speller
from shardscope.parallel.rules.call import Call, Strategy
from shardscope.parallel.rules.local import Local
from shardscope.parallel.rules.pieces import is_cut, mask_others, write_zeros
from shardscope.parallel.rules.terms import lay

__all__ = ["cut_bag", "cut_embedding", "cut_one_hot", "spell_embedding"]

aten = torch.ops.aten


@rule(aten.embedding.default)
def cut_embedding(call: Call) -> Iterator[Strategy]:
    if call["sparse"]:
        return  # sums of sparse gradients are not what collectives do
    num_dims = call.outputs[0].num_dims
    yield lay(call, {"weight": Shard(1)}, Shard(num_dims - 1))
    yield lay(call, {"weight": Partial()}, Partial())
    if call["scale_grad_by_freq"] and call.is_training:
        return  # how often an index occurs is known only to a rank that sees them all
    yield lay(call, {"weight": Shard(0)}, Partial(), is_order_blind=False)
    for dim in range(call["indices"].num_dims):
        yield lay(call, {"indices": Shard(dim)}, Shard(dim))


@speller(aten.embedding.default)
def spell_embedding(local: Local) -> Any:
    """With rows cut, a rank looks up its own and leaves the others zero."""
    table = local.input_layout("weight")
    if not is_cut(table, 0):
        return local.repeat()
    num_rows = table.local_shape(local.seat)[0]
    if num_rows == 0:
        return write_zeros(local, local["weight"])
    own, is_others = mask_others(local, local["indices"], layout=table, dim=0)
    padding = local["padding_idx"] - table.start(0, local.seat)
    padding = padding if local["padding_idx"] >= 0 and 0 <= padding < num_rows else -1
    found = local.repeat(indices=own, padding_idx=padding)
    mask = local.pen.write(aten.unsqueeze.default, is_others, -1)
    return local.pen.write(aten.masked_fill.Scalar, found, mask, 0)


@rule(
    aten.embedding_bag.default,
    aten.embedding_bag.padding_idx,
    inner_op("embedding_bag"),
    inner_op("embedding_bag_forward_only"),
)
def cut_bag(call: Call) -> Iterator[Strategy]:
    """By columns: sums and means know nothing of one another. Maxima say where they were found."""
    is_sum_or_mean = call["mode"] in (0, 1)
    if is_sum_or_mean and not call["sparse"]:
        rest = [Replicate()] * (len(call.outputs) - 1)
        yield lay(call, {"weight": Shard(1)}, [Shard(1), *rest])


@rule(aten.one_hot.default)
def cut_one_hot(call: Call) -> Iterator[Strategy]:
    if call["num_classes"] < 0:
        return  # as many as the largest index anywhere asks for
    for dim in range(call["self"].num_dims):
        yield lay(call, {"self": Shard(dim)}, Shard(dim))
