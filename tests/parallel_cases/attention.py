"""Attention in all its spellings."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from parallel_cases.case import Case, drawn
from shardscope.parallel import Colwise, Rowwise, Shard

__all__ = [
    "HEADS",
    "ONE",
    "QKVO",
    "WAYS",
    "WIDTH",
    "Attention",
    "Fused",
    "FusedByView",
    "angles_for",
    "attention_cases",
    "by_hand",
    "turn_half",
]

WIDTH, HEADS = 16, 4


class Attention(nn.Module):
    """Queries, keys and values apart; `how` attends."""

    def __init__(
        self, how: Callable[..., Tensor], *, kv_heads: int = HEADS, bias: bool = True
    ) -> None:
        super().__init__()
        size = WIDTH // HEADS
        self.how, self.kv_heads = how, kv_heads
        self.wq = nn.Linear(WIDTH, WIDTH, bias=bias)
        self.wk = nn.Linear(WIDTH, kv_heads * size, bias=bias)
        self.wv = nn.Linear(WIDTH, kv_heads * size, bias=bias)
        self.wo = nn.Linear(WIDTH, WIDTH, bias=bias)

    def forward(self, x: Tensor, *more: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q = self.wq(x).view(batch, length, HEADS, -1).transpose(1, 2)
        k = self.wk(x).view(batch, length, self.kv_heads, -1).transpose(1, 2)
        v = self.wv(x).view(batch, length, self.kv_heads, -1).transpose(1, 2)
        return self.wo(self.how(q, k, v, *more).transpose(1, 2).reshape(batch, length, -1))


def by_hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    return scores.softmax(-1) @ v


def causal_by_hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    length = q.shape[-2]
    future = torch.ones(length, length, dtype=torch.bool).triu(1)
    return scores.masked_fill(future, float("-inf")).softmax(-1) @ v


def by_einsum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = torch.einsum("bhqd,bhkd->bhqk", q, k).softmax(-1)
    return torch.einsum("bhqk,bhkd->bhqd", weights, v)


def by_bmm(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    flat = [one.flatten(0, 1) for one in (q, k, v)]
    weights = torch.bmm(flat[0], flat[1].mT).softmax(-1)
    return torch.bmm(weights, flat[2]).view_as(q)


def repeated(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Fewer keys than queries, each repeated, as transformers does."""
    times = q.shape[1] // k.shape[1]
    shape = (k.shape[0], k.shape[1], times, *k.shape[2:])
    k, v = (one[:, :, None].expand(shape).reshape(q.shape) for one in (k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def interleaved(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    times = q.shape[1] // k.shape[1]
    k, v = (one.repeat_interleave(times, 1) for one in (k, v))
    return F.scaled_dot_product_attention(q, k, v)


def turned(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Rotary positions, halves turned."""
    angles = angles_for(q)
    cos, sin = torch.cat([angles, angles], -1).cos(), torch.cat([angles, angles], -1).sin()
    q, k = (one * cos + turn_half(one) * sin for one in (q, k))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def turned_in_pairs(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Rotary positions, neighbours turned by complex numbers."""
    angles = angles_for(q)
    turn = torch.polar(torch.ones_like(angles), angles)
    q, k = (
        torch.view_as_real(
            torch.view_as_complex(one.reshape(*one.shape[:-1], -1, 2)) * turn
        ).flatten(-2)
        for one in (q, k)
    )
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def angles_for(q: Tensor) -> Tensor:
    rates = 1 / 100 ** (torch.arange(0, q.shape[-1], 2, dtype=q.dtype) / q.shape[-1])
    return torch.outer(torch.arange(q.shape[-2], dtype=q.dtype), rates)


def turn_half(x: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat([-second, first], -1)


def sloped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A penalty of its own for each head, by distance."""
    length = q.shape[-2]
    distance = (torch.arange(length)[:, None] - torch.arange(length)).abs()
    slopes = 2.0 ** -torch.arange(1, q.shape[1] + 1, dtype=q.dtype)
    return F.scaled_dot_product_attention(q, k, v, -slopes[:, None, None] * distance)


WAYS: dict[str, Any] = {
    "by hand": by_hand,
    "by hand, causal": causal_by_hand,
    "by einsum": by_einsum,
    "by bmm": by_bmm,
    "in one op": F.scaled_dot_product_attention,
    "in one op, causal": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
    "in one op, with a scale": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, scale=0.3),
    "with rotary positions": turned,
    "with rotary positions in complex numbers": turned_in_pairs,
    "with a slope for each head": sloped,
}
GROUPED: dict[str, Any] = {
    "repeated": repeated,
    "interleaved": interleaved,
    "in one op": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True),
}


class Fused(nn.Module):
    """Queries, keys and values from one weight, perhaps of several sizes."""

    def __init__(self, *, kv_heads: int = HEADS) -> None:
        super().__init__()
        self.size = WIDTH // HEADS
        self.parts = (WIDTH, kv_heads * self.size, kv_heads * self.size)
        self.qkv = nn.Linear(WIDTH, sum(self.parts))
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(x).split(self.parts, -1)
        q, k, v = (one.unflatten(-1, (-1, self.size)).transpose(1, 2) for one in parts)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(attended.transpose(1, 2).flatten(2))


class FusedByView(nn.Module):
    """As vision transformers do it: one weight, seen as three times heads."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        qkv = self.qkv(x).reshape(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        attended = F.scaled_dot_product_attention(q, k, v)
        return self.out(attended.transpose(1, 2).reshape(batch, length, -1))


class FusedByHead(nn.Module):
    """As GPT-NeoX does it: one weight, each head with its own query, key and value."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        q, k, v = heads.chunk(3, -1)
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Mha(nn.Module):
    """Torch's own attention and encoder layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 32, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


QKVO = {"wq": Colwise(), "wk": Colwise(), "wv": Colwise(), "wo": Rowwise()}
ONE = {"counts": {"all_reduce": 1}, "joint_counts": {"all_reduce": 1}}


def attention_cases() -> Iterator[Case]:
    give = lambda: (drawn(2, 6, WIDTH),)  # noqa: E731
    for name, way in WAYS.items():
        make = lambda way=way: Attention(way)  # noqa: E731
        yield Case(f"attention {name}", make, give, QKVO, **ONE)
    for name, way in GROUPED.items():
        make = lambda way=way: Attention(way, kv_heads=2)  # noqa: E731
        yield Case(f"grouped queries {name}", make, give, QKVO, **ONE)
        few = {"wq": Colwise(), "wo": Rowwise()}
        yield Case(f"grouped queries {name}, fewer keys than ranks", make, give, few, mesh="tp=4")
    masked = lambda mask: lambda: (*give(), mask())  # noqa: E731
    how = lambda q, k, v, mask: F.scaled_dot_product_attention(q, k, v, mask)  # noqa: E731
    masks = {
        "of booleans": lambda: torch.ones(6, 6, dtype=torch.bool).tril(),
        "of numbers, by batch": lambda: drawn(2, 1, 6, 6),
        "by head": lambda: drawn(1, HEADS, 6, 6),
    }
    for name, mask in masks.items():
        yield Case(
            f"attention with a mask {name}", lambda: Attention(how), masked(mask), QKVO, **ONE
        )
    yield Case("attention on four", lambda: Attention(by_hand), give, QKVO, mesh="tp=4", **ONE)
    for name, make, style in (
        ("fused", Fused, Colwise(fused=3)),
        ("fused, of several sizes", lambda: Fused(kv_heads=2), Colwise(fused=(16, 8, 8))),
        ("fused, seen as three", FusedByView, Colwise(fused=3)),
        ("fused, by head", FusedByHead, Colwise()),
    ):
        yield Case(f"attention {name}", make, give, {"qkv": style, "out": Rowwise()}, **ONE)
    yield Case(
        "attention fused and cut without saying so",
        Fused,
        give,
        {"qkv": Colwise(), "out": Rowwise()},
    )
    yield Case(
        "attention whose sequence is cut",
        lambda: Attention(by_hand),
        give,
        {},
        mesh="cp=2",
        inputs={"x": Shard(1)},
    )
    inner = {
        "layer.self_attn.in_proj_weight": Shard(0),
        "layer.self_attn.out_proj.weight": Shard(1),
        "layer.linear1": Colwise(),
        "layer.linear2": Rowwise(),
    }
    yield Case("torch's encoder layer", Mha, give, inner)
