"""The blocks and models that are built of attention."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from parallel_cases.attention import (
    HEADS,
    QKVO,
    WIDTH,
    Attention,
    Fused,
    FusedByView,
    angles_for,
    by_hand,
    turn_half,
)
from parallel_cases.case import Case, drawn, tokens
from parallel_cases.layers import Gated, Mlp
from shardscope.parallel import Colwise, ModuleInput, Replicate, Rowwise, Sequence, Shard

__all__ = [
    "LLAMA",
    "LLAMA_SEQUENCE",
    "LLAMA_VOCABULARY",
    "Gpt",
    "GptBlock",
    "Llama",
    "Loss",
    "transformer_cases",
]


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
        q, k = (one * cos + turn_half(one) * sin for one in (q, k))
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
        angles = angles_for(torch.empty(length, WIDTH // HEADS))
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


def transformer_cases() -> Iterator[Case]:
    yield from _blocks()
    yield from _llamas()


def _blocks() -> Iterator[Case]:
    give = lambda: (drawn(2, 6, WIDTH),)  # noqa: E731
    block = {name.removeprefix("layers.*."): style for name, style in GPT.items()}
    two = {"counts": {"all_reduce": 2}, "joint_counts": {"all_reduce": 4}}
    yield Case("gpt block", GptBlock, give, block, **two)
    yield Case("gpt block on four", GptBlock, give, block, mesh="tp=4", **two)
    text = lambda: (tokens(2, 6),)  # noqa: E731
    yield Case("gpt", Gpt, text, GPT, counts={"all_reduce": 4}, joint_counts={"all_reduce": 8})
    yield Case(
        "gpt with its vocabulary cut",
        Gpt,
        text,
        {**GPT, "embed": Rowwise(), "head": Colwise(output=Replicate())},
    )
    t5 = {f"attn.{k}": v for k, v in QKVO.items()}
    t5 |= {
        f"mlp.inner.{k}": v
        for k, v in {"gate": Colwise(), "up": Colwise(), "down": Rowwise()}.items()
    }
    yield Case("t5 block", T5Block, give, t5)
    yield Case("t5 block with its bias cut by head", T5Block, give, {**t5, "bias": Colwise()})
    vit = {
        "attn.qkv": Colwise(fused=3),
        "attn.out": Rowwise(),
        "mlp.up": Colwise(),
        "mlp.down": Rowwise(),
    }
    image = lambda: (drawn(2, 3, 8, 8),)  # noqa: E731
    yield Case("vit", Vit, image, vit)
    yield Case("vit with its patches cut", Vit, image, {**vit, "patches": Colwise()})
    yield Case(
        "vit on cut data", Vit, image, vit, mesh="dp=2,tp=2", inputs={"image": {"dp": Shard(0)}}
    )
    bert = {f"attn.{k}": v for k, v in QKVO.items()} | {"mlp.up": Colwise(), "mlp.down": Rowwise()}
    padded = lambda: (drawn(2, 6, WIDTH), torch.arange(6) < torch.tensor([[4], [6]]))  # noqa: E731
    yield Case("bert", Bert, padded, bert)
    sequence = {
        **bert,
        "attn": ModuleInput(Replicate()),
        "attn.wo": Rowwise(output=Shard(1)),
        "norm1": Sequence(),
        "mlp.down": Rowwise(output=Shard(1)),
        "norm2": Sequence(),
        "pool": ModuleInput(Replicate()),
    }
    yield Case("bert with its sequence cut", Bert, padded, sequence)


def _llamas() -> Iterator[Case]:
    text = lambda: (tokens(2, 8), tokens(2, 8))  # noqa: E731
    for n in (1, 2):
        counts = {"counts": {"all_reduce": 2 * n}, "joint_counts": {"all_reduce": 4 * n}}
        make = lambda n=n: Loss(Llama(n))  # noqa: E731
        yield Case(f"llama of {n}", make, text, _lm(LLAMA), trains=n > 1, **counts)
    yield Case("llama with its vocabulary cut", lambda: Loss(Llama(1)), text, _lm(LLAMA_VOCABULARY))
    yield Case("llama with its sequence cut", lambda: Loss(Llama(1)), text, _lm(LLAMA_SEQUENCE))
    few = {name: style for name, style in LLAMA.items() if "[qkv]" not in name}
    few["layers.*.attn.wq"] = Colwise()
    yield Case(
        "llama, keys fewer than ranks",
        lambda: Loss(Llama(1)),
        text,
        _lm(few),
        mesh="tp=4",
        trains=False,
    )
    data = {"ids": {"dp": Shard(0)}, "labels": {"dp": Shard(0)}}
    both = {"mesh": "dp=2,tp=2", "inputs": data}
    yield Case("llama on a 2-d mesh", lambda: Loss(Llama(1)), text, _lm(LLAMA_VOCABULARY), **both)
    yield Case(
        "llama on a 2-d mesh, sequence cut",
        lambda: Loss(Llama(1)),
        text,
        _lm(LLAMA_SEQUENCE),
        **both,
        trains=False,
    )
    narrow = {"dtype": torch.bfloat16, "tolerance": 0.1}
    yield Case("llama in bfloat16", lambda: Loss(Llama(1)), text, _lm(LLAMA), **narrow)
    yield Case(
        "llama in single precision",
        lambda: Loss(Llama(1)),
        text,
        _lm(LLAMA_SEQUENCE),
        dtype=torch.float32,
        tolerance=1e-4,
        trains=False,
    )


def _lm(plan: dict[str, Any]) -> dict[str, Any]:
    return {f"lm.{name}": style for name, style in plan.items()}
