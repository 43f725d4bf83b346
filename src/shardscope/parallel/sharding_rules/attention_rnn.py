"""Attention, sharded along the batch, the heads or the queries, and recurrent layers, sharded along
the batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from shardscope._torch.dispatch import private_aten_op
from shardscope.parallel.ir.graph import Strategy
from shardscope.parallel.sharding_rules.builders import (
    broadcast_shard,
    has_nonempty_shards,
    make_strategy,
    to_compute_dtype,
)
from shardscope.parallel.sharding_rules.context import OpCall
from shardscope.parallel.sharding_rules.registry import decomposition, rule
from shardscope.plan.placements import Placement, Replicate, Shard, Size, divides

aten = torch.ops.aten


@rule(aten.scaled_dot_product_attention.default)
def shard_attention(call: OpCall) -> Iterator[Strategy]:
    """No strategy with dropout: its random masks must equal the single device's, so it is
    decomposed.
    """
    if call["dropout_p"] == 0:
        yield from _shard_batch_and_heads(call, "attn_mask")
        yield from _shard_queries(call)


@rule(
    private_aten_op("scaled_dot_product_flash_attention"),
    private_aten_op("scaled_dot_product_flash_attention_for_cpu"),
    private_aten_op("scaled_dot_product_efficient_attention"),
    private_aten_op("scaled_dot_product_cudnn_attention"),
)
def shard_fused_attention(call: OpCall) -> Iterator[Strategy]:
    """Fused kernels, which also return the logsumexp; no other outputs are sharded."""
    if call["dropout_p"] == 0 and not call.arguments.get("return_debug_mask"):
        mask = "attn_mask" if "attn_mask" in call.arguments else "attn_bias"
        yield from _shard_batch_and_heads(call, mask if mask in call.arguments else None)


def _shard_batch_and_heads(call: OpCall, mask: str | None) -> Iterator[Strategy]:
    """Shard a leading dim of query, key and value, and of the mask where it is not broadcast."""
    output = call.outputs[0]
    for dim in range(output.num_dims - 2):
        if output.shape[dim] == 1 or not has_nonempty_shards(call, output.shape[dim]):
            continue  # kernels divide by sizes, so no rank may have an empty shard
        placements: dict[str, Placement] = {
            name: broadcast_shard(call[name], output.shape, dim)
            for name in ("query", "key", "value")
        }
        if not _has_matching_shards(call, placements, output.shape[dim]):
            continue
        if mask is not None:
            placements[mask] = broadcast_shard(call[mask], output.shape, dim)
        yield make_strategy(call, placements, _output_placements(call, Shard(dim)))


def _has_matching_shards(call: OpCall, placements: dict[str, Placement], size: Size) -> bool:
    """Whether query heads and the key heads they share are on the same rank: each rank holds
    complete groups.
    """
    sizes = [
        call.tensor(name).shape[placement.dim]
        for name, placement in placements.items()
        if isinstance(placement, Shard)
    ]
    return all(
        shard_dim_size == size or divides(call.num_ranks, shard_dim_size)
        for shard_dim_size in sizes
    )


def _output_placements(call: OpCall, shard: Shard) -> list[Placement]:
    """The result and the logsumexp are sharded; random state and sequence lengths are
    replicated.
    """
    return [shard if index < 2 else Replicate() for index in range(len(call.outputs))]


def _shard_queries(call: OpCall) -> Iterator[Strategy]:
    """Shard the queries; every rank sees all keys. Not with a causal mask, which depends on query
    positions.
    """
    output = call.outputs[0]
    if call["is_causal"] or call.tensor("query").num_dims != output.num_dims:
        return
    shard = Shard(output.num_dims - 2)
    mask = broadcast_shard(call["attn_mask"], output.shape, shard.dim)
    yield make_strategy(call, {"query": shard, "attn_mask": mask}, shard)


@decomposition(aten.scaled_dot_product_attention.default)
def decompose_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Repeat shared key and value heads; with dropout, compute the steps of the CPU
    implementation.
    """
    if enable_gqa:
        key, value = (_repeat_heads(tensor, query) for tensor in (key, value))
    if dropout_p > 0:
        if query.device.type not in ("cpu", "meta"):
            raise NotImplementedError("fused kernels draw masks that only they can draw")
        return _attend(
            query, key, value, _float_mask(query, key, attn_mask, is_causal), (dropout_p, scale)
        )
    if not enable_gqa:
        raise NotImplementedError
    result: Tensor = aten.scaled_dot_product_attention(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale
    )
    return result


def _repeat_heads(shared: Tensor, query: Tensor) -> Tensor:
    return shared.repeat_interleave(query.shape[-3] // shared.shape[-3], -3)


def _float_mask(query: Tensor, key: Tensor, mask: Tensor | None, is_causal: bool) -> Tensor | None:
    if is_causal:
        shape = (query.shape[-2], key.shape[-2])
        mask = torch.ones(shape, dtype=torch.bool, device=query.device).tril()
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.zeros(mask.shape, device=query.device).masked_fill(~mask, -math.inf)


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    settings: tuple[float, float | None],
) -> Tensor:
    dropout_p, scale = settings
    wide_query, wide_key, wide_value = map(to_compute_dtype, (query, key, value))
    factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = torch.matmul(wide_query * factor, wide_key.transpose(-2, -1))
    weights = scores.softmax(-1) if mask is None else _safe_softmax(scores + mask)
    attended = torch.matmul(aten.dropout(weights, dropout_p, True), wide_value)
    return attended.to(query.dtype)


def _safe_softmax(scores: Tensor) -> Tensor:
    """Softmax with zeros, also in the gradient, for queries whose keys are all masked."""
    is_fully_masked = scores.eq(-math.inf).all(-1, keepdim=True)
    return scores.masked_fill(is_fully_masked, 0.0).softmax(-1).masked_fill(is_fully_masked, 0.0)


@rule(aten.lstm.input, aten.gru.input, aten.rnn_tanh.input, aten.rnn_relu.input)
def shard_recurrent(call: OpCall) -> Iterator[Strategy]:
    """The batch dim. Not with dropout between layers, which draws masks for the full batch."""
    is_random = call["train"] and call["dropout"] > 0 and call["num_layers"] > 1
    if call.tensor("input").num_dims != 3 or is_random:
        return
    batch = Shard(0 if call["batch_first"] else 1)
    states: list[Placement] = [Shard(1)] * (len(call.outputs) - 1)
    hidden = states if call.op == aten.lstm.input else states[0]
    yield make_strategy(call, {"input": batch, "hx": hidden}, [batch, *states])
