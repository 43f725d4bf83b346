"""Attention in pieces of the batch, of the heads, or of the queries."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from shardscope._torch.inner_ops import inner_op
from shardscope.parallel.placements import Placement, Replicate, Shard, divides
from shardscope.parallel.rules.book import decomposition, rule
from shardscope.parallel.rules.call import Call, Strategy, TensorSpec
from shardscope.parallel.rules.terms import broadcast_cut, lay, leaves_some

__all__ = ["cut_attention", "cut_fused_attention", "take_attention_apart"]

aten = torch.ops.aten


@rule(aten.scaled_dot_product_attention.default)
def cut_attention(call: Call) -> Iterator[Strategy]:
    """Random masks have to be those of the single device, so with dropout it is taken apart."""
    if call["dropout_p"] == 0:
        yield from _cut_batch_and_heads(call, "attn_mask")
        yield from _cut_queries(call)


@rule(
    inner_op("scaled_dot_product_flash_attention"),
    inner_op("scaled_dot_product_flash_attention_for_cpu"),
    inner_op("scaled_dot_product_efficient_attention"),
    inner_op("scaled_dot_product_cudnn_attention"),
)
def cut_fused_attention(call: Call) -> Iterator[Strategy]:
    """The kernels that return the logarithm of the sums too; of the rest nothing is cut."""
    if call["dropout_p"] == 0 and not call.arguments.get("return_debug_mask"):
        mask = "attn_mask" if "attn_mask" in call.arguments else "attn_bias"
        yield from _cut_batch_and_heads(call, mask if mask in call.arguments else None)


def _cut_batch_and_heads(call: Call, mask: str | None) -> Iterator[Strategy]:
    whole = call.outputs[0]
    for dim in range(whole.num_dims - 2):
        if whole.shape[dim] == 1 or not leaves_some(call, whole.shape[dim]):
            continue  # kernels divide by sizes
        cuts: dict[str, Placement] = {
            name: broadcast_cut(call[name], whole, dim) for name in ("query", "key", "value")
        }
        if not _are_cut_alike(call, cuts, whole.shape[dim]):
            continue
        if mask is not None:
            cuts[mask] = broadcast_cut(call[mask], whole, dim)
        yield lay(call, cuts, _outputs(call, Shard(dim)))


def _are_cut_alike(call: Call, cuts: dict[str, Placement], size: Any) -> bool:
    """Heads of queries that share keys stay with them where every rank gets whole groups."""
    sizes = [call[name].shape[cut.dim] for name, cut in cuts.items() if isinstance(cut, Shard)]
    return all(one == size or divides(call.num_ranks, one) for one in sizes)


def _outputs(call: Call, cut: Shard) -> list[Placement]:
    """The result and the logarithms are cut; random state and sequence lengths are whole."""
    return [cut if index < 2 else Replicate() for index in range(len(call.outputs))]


def _cut_queries(call: Call) -> Iterator[Strategy]:
    """Every rank sees all keys. A causal mask would have to know which queries are here."""
    whole = call.outputs[0]
    if call["is_causal"] or call["query"].num_dims != whole.num_dims:
        return
    cut = Shard(whole.num_dims - 2)
    mask: TensorSpec | None = call["attn_mask"]
    yield lay(call, {"query": cut, "attn_mask": broadcast_cut(mask, whole, cut.dim)}, cut)


@decomposition(aten.scaled_dot_product_attention.default)
def take_attention_apart(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Each head with keys of its own; with dropout, the steps that the CPU takes."""
    if enable_gqa:
        key, value = (_repeat_heads(one, query) for one in (key, value))
    if dropout_p > 0:
        if query.device.type not in ("cpu", "meta"):
            raise NotImplementedError("fused kernels draw masks that only they can draw")
        return _attend(
            query, key, value, _float_mask(query, key, attn_mask, is_causal), (dropout_p, scale)
        )
    if not enable_gqa:
        raise NotImplementedError
    return aten.scaled_dot_product_attention(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale
    )


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
    wide = [
        one.float() if one.dtype in (torch.half, torch.bfloat16) else one
        for one in (query, key, value)
    ]
    factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = torch.matmul(wide[0] * factor, wide[1].transpose(-2, -1))
    weights = scores.softmax(-1) if mask is None else _softmax_safely(scores + mask)
    attended = torch.matmul(aten.dropout(weights, dropout_p, True), wide[2])
    return attended.to(query.dtype)


def _softmax_safely(scores: Tensor) -> Tensor:
    """A query that may look at nothing gets zeros, in the gradient too."""
    is_blind = scores.eq(-math.inf).all(-1, keepdim=True)
    return scores.masked_fill(is_blind, 0.0).softmax(-1).masked_fill(is_blind, 0.0)
