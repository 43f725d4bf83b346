"""Attention in all its spellings, and the blocks built of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parallel_cases.case import Case, drawn, tokens
from parallel_cases.layers import Gated, Mlp
from shardscope.parallel import Colwise, ModuleInput, Replicate, Rowwise, Sequence, Shard

__all__ = [
    "LLAMA",
    "LLAMA_SEQUENCE",
    "LLAMA_VOCABULARY",
    "QKVO",
    "WAYS",
    "Attention",
    "Fused",
    "FusedByView",
    "Gpt",
    "GptBlock",
    "Llama",
    "Loss",
    "transformer_cases",
]

WIDTH, HEADS = 16, 4


class Attention(nn.Module):
    """Queries, keys and values apart; `how` attends."""

    def __init__(self, how: Callable[..., Tensor], *, kv_heads: int = HEADS, bias: bool = True) -> None:
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
    angles = _angles(q)
    cos, sin = torch.cat([angles, angles], -1).cos(), torch.cat([angles, angles], -1).sin()
    q, k = (one * cos + _turn_half(one) * sin for one in (q, k))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def turned_in_pairs(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Rotary positions, neighbours turned by complex numbers."""
    angles = _angles(q)
    turn = torch.polar(torch.ones_like(angles), angles)
    q, k = (
        torch.view_as_real(torch.view_as_complex(one.reshape(*one.shape[:-1], -1, 2)) * turn).flatten(-2)
        for one in (q, k)
    )  # fmt: skip
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def _angles(q: Tensor) -> Tensor:
    rates = 1 / 100 ** (torch.arange(0, q.shape[-1], 2, dtype=q.dtype) / q.shape[-1])
    return torch.outer(torch.arange(q.shape[-2], dtype=q.dtype), rates)


def _turn_half(x: Tensor) -> Tensor:
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


class GptBlock(nn.Module):
    """Norms first, a fused attention, an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn, self.mlp = Fused(), Mlp(WIDTH, 2 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Gpt(nn.Module):
    """GPT-2: learned positions, tied head."""

    def __init__(self, num_layers: int = 2) -> None:
        super().__init__()
        self.embed, self.positions = nn.Embedding(12, WIDTH), nn.Embedding(8, WIDTH)
        self.layers = nn.ModuleList(GptBlock() for _ in range(num_layers))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 12, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.positions(torch.arange(ids.shape[1]))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class RmsNorm(nn.Module):
    """In single precision at least, whatever comes in."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
        return self.weight * (wide * scale).type_as(x)


class LlamaBlock(nn.Module):
    """Norms first, grouped queries with rotary positions, a gated MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = RmsNorm(), RmsNorm()
        self.attn = Attention(self.attend, kv_heads=2, bias=False)
        self.mlp = nn.ModuleDict(
            {
                "gate": nn.Linear(WIDTH, 24, bias=False),
                "up": nn.Linear(WIDTH, 24, bias=False),
                "down": nn.Linear(24, WIDTH, bias=False),
            }
        )

    @staticmethod
    def attend(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k = (one * cos + _turn_half(one) * sin for one in (q, k))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x), cos, sin)
        h, mlp = self.norm2(x), self.mlp
        return x + mlp["down"](F.silu(mlp["gate"](h)) * mlp["up"](h))


class Llama(nn.Module):
    """Rotary tables that are not saved with the weights."""

    cos: Tensor
    sin: Tensor

    def __init__(self, num_layers: int = 1, *, length: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, WIDTH)
        self.layers = nn.ModuleList(LlamaBlock() for _ in range(num_layers))
        self.norm = RmsNorm()
        self.head = nn.Linear(WIDTH, 12, bias=False)
        angles = _angles(torch.empty(length, WIDTH // HEADS))
        angles = torch.cat([angles, angles], -1)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        length = ids.shape[1]
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x, self.cos[:length], self.sin[:length])
        return self.head(self.norm(x))


class Loss(nn.Module):
    """The next token's."""

    def __init__(self, lm: nn.Module) -> None:
        super().__init__()
        self.lm = lm

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.lm(ids).flatten(0, 1), labels.flatten())


class T5Block(nn.Module):
    """Attention with a learned bias by distance, one for each head."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Embedding(5, HEADS)
        self.attn = Attention(self.attend, bias=False)
        self.cross = Attention(by_hand, bias=False)
        self.mlp = Gated8()

    @staticmethod
    def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        return (q @ k.mT + bias).softmax(-1) @ v

    def forward(self, x: Tensor) -> Tensor:
        where = torch.arange(x.shape[1])
        distance = (where[:, None] - where).clamp(-2, 2) + 2
        x = x + self.attn(x, self.bias(distance).permute(2, 0, 1)[None])
        return x + self.mlp(x)


class Gated8(nn.Module):
    """A gated MLP as wide as the others here."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.inner, self.outof = nn.Linear(WIDTH, 8), Gated(), nn.Linear(8, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.outof(self.inner(self.into(x)))


class Vit(nn.Module):
    """Patches by a convolution, a token for the class, learned positions."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, 4, stride=4)
        self.token = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.positions = nn.Parameter(torch.randn(1, 5, WIDTH))
        self.attn, self.mlp = FusedByView(), Mlp(WIDTH, 2 * WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 6)

    def forward(self, image: Tensor) -> Tensor:
        x = self.patches(image).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.positions
        x = x + self.attn(self.norm(x))
        return self.head(self.norm(x + self.mlp(x))[:, 0])


class Bert(nn.Module):
    """Norms last, a mask of what is padding, a pooled first token."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = Attention(self.attend)
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.mlp, self.pool = Mlp(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)

    @staticmethod
    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, mask[:, None, None, :])

    def forward(self, x: Tensor, mask: Tensor) -> dict[str, Tensor]:
        x = self.norm1(x + self.attn(x, mask))
        x = self.norm2(x + self.mlp(x))
        return {"hidden": x, "pooled": torch.tanh(self.pool(x[:, 0]))}


class Mha(nn.Module):
    """Torch's own attention and encoder layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 32, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


QKVO = {"wq": Colwise(), "wk": Colwise(), "wv": Colwise(), "wo": Rowwise()}
LLAMA = {
    "layers.*.attn.w[qkv]": Colwise(),
    "layers.*.attn.wo": Rowwise(),
    "layers.*.mlp.gate": Colwise(),
    "layers.*.mlp.up": Colwise(),
    "layers.*.mlp.down": Rowwise(),
}
LLAMA_VOCABULARY = {**LLAMA, "embed": Rowwise(), "head": Colwise(output=Shard(-1))}
LLAMA_SEQUENCE = {
    **LLAMA,
    "embed": Rowwise(output=Shard(1)),
    "layers.*.norm[12]": Sequence(),
    "norm": Sequence(),
    "layers.*.attn.wo": Rowwise(output=Shard(1)),
    "layers.*.mlp.down": Rowwise(output=Shard(1)),
    "head": Colwise(output=Shard(-1)),
}
GPT = {
    "layers.*.attn.qkv": Colwise(fused=3, heads=HEADS),
    "layers.*.attn.out": Rowwise(),
    "layers.*.mlp.up": Colwise(),
    "layers.*.mlp.down": Rowwise(),
}
ONE = {"counts": {"all_reduce": 1}, "joint_counts": {"all_reduce": 1}}


def transformer_cases() -> Iterator[Case]:
    yield from _attentions()
    yield from _blocks()
    yield from _llamas()


def _attentions() -> Iterator[Case]:
    give = lambda: (drawn(2, 6, WIDTH),)  # noqa: E731
    for name, way in WAYS.items():
        make = lambda way=way: Attention(way)  # noqa: E731
        yield Case(f"attention {name}", make, give, QKVO, **ONE)
    for name, way in GROUPED.items():
        make = lambda way=way: Attention(way, kv_heads=2)  # noqa: E731
        yield Case(f"grouped queries {name}", make, give, QKVO, **ONE)
        yield Case(f"grouped queries {name}, fewer keys than ranks", make, give, QKVO, mesh="tp=4")
    masked = lambda mask: lambda: (*give(), mask())  # noqa: E731
    how = lambda q, k, v, mask: F.scaled_dot_product_attention(q, k, v, mask)  # noqa: E731
    masks = {
        "of booleans": lambda: torch.ones(6, 6, dtype=torch.bool).tril(),
        "of numbers, by batch": lambda: drawn(2, 1, 6, 6),
        "by head": lambda: drawn(1, HEADS, 6, 6),
    }
    for name, mask in masks.items():
        yield Case(f"attention with a mask {name}", lambda: Attention(how), masked(mask), QKVO, **ONE)  # fmt: skip
    yield Case("attention on three", lambda: Attention(by_hand), give, QKVO, mesh="tp=3")
    yield Case("attention on four", lambda: Attention(by_hand), give, QKVO, mesh="tp=4", **ONE)
    for name, make, style in (
        ("fused", Fused, Colwise(fused=3)),
        ("fused, of several sizes", lambda: Fused(kv_heads=2), Colwise(fused=(16, 8, 8))),
        ("fused, seen as three", FusedByView, Colwise(fused=3)),
        ("fused, by head", FusedByHead, Colwise()),
    ):
        yield Case(f"attention {name}", make, give, {"qkv": style, "out": Rowwise()}, **ONE)
    yield Case("attention fused and cut without saying so", Fused, give, {"qkv": Colwise(), "out": Rowwise()})  # fmt: skip
    yield Case("attention whose sequence is cut", lambda: Attention(by_hand), give, {}, mesh="cp=2", inputs={"x": Shard(1)})  # fmt: skip
    inner = {"layer.self_attn.in_proj_weight": Shard(0), "layer.self_attn.out_proj.weight": Shard(1), "layer.linear1": Colwise(), "layer.linear2": Rowwise()}  # fmt: skip
    yield Case("torch's encoder layer", Mha, give, inner)


def _blocks() -> Iterator[Case]:
    give = lambda: (drawn(2, 6, WIDTH),)  # noqa: E731
    block = {name.removeprefix("layers.*."): style for name, style in GPT.items()}
    two = {"counts": {"all_reduce": 2}, "joint_counts": {"all_reduce": 4}}
    yield Case("gpt block", GptBlock, give, block, **two)
    yield Case("gpt block on four", GptBlock, give, block, mesh="tp=4", **two)
    text = lambda: (tokens(2, 6),)  # noqa: E731
    yield Case("gpt", Gpt, text, GPT, counts={"all_reduce": 4}, joint_counts={"all_reduce": 8})
    yield Case("gpt with its vocabulary cut", Gpt, text, {**GPT, "embed": Rowwise(), "head": Colwise(output=Replicate())})  # fmt: skip
    t5 = {f"attn.{k}": v for k, v in QKVO.items()}
    t5 |= {f"mlp.inner.{k}": v for k, v in {"gate": Colwise(), "up": Colwise(), "down": Rowwise()}.items()}  # fmt: skip
    yield Case("t5 block", T5Block, give, t5)
    yield Case("t5 block with its bias cut by head", T5Block, give, {**t5, "bias": Colwise()})
    vit = {"attn.qkv": Colwise(fused=3), "attn.out": Rowwise(), "mlp.up": Colwise(), "mlp.down": Rowwise()}  # fmt: skip
    image = lambda: (drawn(2, 3, 8, 8),)  # noqa: E731
    yield Case("vit", Vit, image, vit)
    yield Case("vit with its patches cut", Vit, image, {**vit, "patches": Colwise()})
    yield Case("vit on cut data", Vit, image, vit, mesh="dp=2,tp=2", inputs={"image": {"dp": Shard(0)}})  # fmt: skip
    bert = {f"attn.{k}": v for k, v in QKVO.items()} | {"mlp.up": Colwise(), "mlp.down": Rowwise()}
    padded = lambda: (drawn(2, 6, WIDTH), torch.arange(6) < torch.tensor([[4], [6]]))  # noqa: E731
    yield Case("bert", Bert, padded, bert)
    sequence = {**bert, "attn": ModuleInput(Replicate()), "attn.wo": Rowwise(output=Shard(1)), "norm1": Sequence(), "mlp.down": Rowwise(output=Shard(1)), "norm2": Sequence(), "pool": ModuleInput(Replicate())}  # fmt: skip
    yield Case("bert with its sequence cut", Bert, padded, sequence)


def _llamas() -> Iterator[Case]:
    text = lambda: (tokens(2, 8), tokens(2, 8))  # noqa: E731
    for n in (1, 3):
        counts = {"counts": {"all_reduce": 2 * n}, "joint_counts": {"all_reduce": 4 * n}}
        make = lambda n=n: Loss(Llama(n))  # noqa: E731
        yield Case(f"llama of {n}", make, text, _lm(LLAMA), **counts)
    sequence = {"reduce_scatter_tensor": 5, "all_gather_into_tensor": 5}
    yield Case("llama with its vocabulary cut", lambda: Loss(Llama(2)), text, _lm(LLAMA_VOCABULARY))
    yield Case("llama with its sequence cut", lambda: Loss(Llama(2)), text, _lm(LLAMA_SEQUENCE))
    del sequence
    yield Case("llama, keys fewer than ranks", lambda: Loss(Llama(1)), text, _lm(LLAMA), mesh="tp=4")  # fmt: skip
    data = {"ids": {"dp": Shard(0)}, "labels": {"dp": Shard(0)}}
    both = {"mesh": "dp=2,tp=2", "inputs": data}
    yield Case("llama on a 2-d mesh", lambda: Loss(Llama(1)), text, _lm(LLAMA_VOCABULARY), **both)
    yield Case("llama on a 2-d mesh, sequence cut", lambda: Loss(Llama(1)), text, _lm(LLAMA_SEQUENCE), **both)  # fmt: skip
    narrow = {"dtype": torch.bfloat16, "tolerance": 0.1}
    yield Case("llama in bfloat16", lambda: Loss(Llama(1)), text, _lm(LLAMA), **narrow)
    yield Case("llama in single precision", lambda: Loss(Llama(1)), text, _lm(LLAMA_SEQUENCE), dtype=torch.float32, tolerance=1e-4)  # fmt: skip


def _lm(plan: dict[str, Any]) -> dict[str, Any]:
    return {f"lm.{name}": style for name, style in plan.items()}
