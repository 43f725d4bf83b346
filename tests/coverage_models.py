"""Small models of the kinds that people shard, each with what to call it with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from shardscope.cli._llama import LLAMA_TINY, Llama

__all__ = ["MODELS", "Gpt2", "MixtureOfExperts", "ResNet", "VisionTransformer"]


class Gpt2Block(nn.Module):
    """Attention and feed-forward, each behind a LayerNorm."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.ln_1 = nn.LayerNorm(dim)
        self.c_attn = nn.Linear(dim, 3 * dim)
        self.c_proj = nn.Linear(dim, dim)
        self.ln_2 = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(
            nn.Linear(dim, 4 * dim), nn.GELU("tanh"), nn.Linear(4 * dim, dim), nn.Dropout(0.1)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))

    def attend(self, x: Tensor) -> Tensor:
        batch, length, dim = x.shape
        heads = self.c_attn(x).view(batch, length, 3 * self.num_heads, -1).transpose(1, 2)
        query, key, value = heads.split(self.num_heads, dim=1)
        scores = query @ key.transpose(-2, -1) / query.shape[-1] ** 0.5
        hidden = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        mixed = scores.masked_fill(hidden, float("-inf")).softmax(dim=-1) @ value
        return self.c_proj(mixed.transpose(1, 2).reshape(batch, length, dim))


class Gpt2(nn.Module):
    """Token ids in, a dict with logits and loss out; the output weight is the embedding's."""

    def __init__(self, dim: int = 16, num_layers: int = 2, vocab_size: int = 32) -> None:
        super().__init__()
        self.wte = nn.Embedding(vocab_size, dim)
        self.wpe = nn.Embedding(16, dim)
        self.h = nn.ModuleList(Gpt2Block(dim, num_heads=4) for _ in range(num_layers))
        self.ln_f = nn.LayerNorm(dim)
        self.lm_head = nn.Linear(dim, vocab_size, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> dict[str, Tensor]:
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        if targets is None:
            return {"logits": logits}
        loss = functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return {"logits": logits, "loss": loss}


class ResBlock(nn.Module):
    """Two convolutions beside a shortcut."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(after)
        self.conv2 = nn.Conv2d(after, after, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(after)
        self.down = nn.Conv2d(before, after, 1, stride=stride, bias=False)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        return self.relu(self.bn2(self.conv2(out)) + self.down(x))


class ResNet(nn.Module):
    """Images in, logits out, with batch statistics on the way."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(8)
        self.maxpool = nn.MaxPool2d(2)
        self.layer1 = ResBlock(8, 8, stride=1)
        self.layer2 = ResBlock(8, 16, stride=2)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(16, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.maxpool(torch.relu(self.bn1(self.conv1(images))))
        x = self.pool(self.layer2(self.layer1(x)))
        return self.fc(torch.flatten(x, 1))


class VitBlock(nn.Module):
    """torch's own attention, and a feed-forward, each behind a LayerNorm."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.attention = nn.MultiheadAttention(dim, 4, batch_first=True)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        x = x + self.attention(y, y, y)[0]
        return x + self.mlp(self.norm2(x))


class VisionTransformer(nn.Module):
    """Images cut into patches, a class token in front, logits from it."""

    def __init__(self, dim: int = 16) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, dim, 4, stride=4)
        self.cls = nn.Parameter(torch.zeros(1, 1, dim))
        self.positions = nn.Parameter(torch.randn(1, 17, dim))
        self.blocks = nn.Sequential(VitBlock(dim), VitBlock(dim))
        self.head = nn.Linear(dim, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(x.shape[0], -1, -1), x], dim=1) + self.positions
        return self.head(self.blocks(x)[:, 0])


class MixtureOfExperts(nn.Module):
    """Each token goes to its two best experts; all experts' weights are one tensor."""

    def __init__(self, dim: int = 16, num_experts: int = 4) -> None:
        super().__init__()
        self.router = nn.Linear(dim, num_experts, bias=False)
        self.up = nn.Parameter(torch.randn(num_experts, dim, 32) * 0.1)
        self.down = nn.Parameter(torch.randn(num_experts, 32, dim) * 0.1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        chances = self.router(x).softmax(dim=-1)
        best, chosen = chances.topk(2, dim=-1)
        weights = torch.zeros_like(chances).scatter(-1, chosen, best / best.sum(-1, keepdim=True))
        hidden = functional.silu(torch.einsum("td,edh->eth", x, self.up))
        each = torch.bmm(hidden, self.down)
        balance = (chances.mean(0) * (weights > 0).float().mean(0)).sum()
        return torch.einsum("etd,te->td", each, weights), balance


def _tokens(*shape: int) -> Tensor:
    return torch.randint(0, 32, shape)


def _targets(*shape: int) -> Tensor:
    """Some of which the loss ignores, more on one rank than on the other."""
    targets = _tokens(*shape)
    targets[0, :4] = -100
    return targets


MODELS: dict[str, Callable[[], tuple[nn.Module, tuple[Any, ...]]]] = {
    "llama": lambda: (Llama(LLAMA_TINY), (_tokens(2, 8),)),
    "gpt2": lambda: (Gpt2(), (_tokens(2, 8), _targets(2, 8))),
    "resnet": lambda: (ResNet(), (torch.randn(4, 3, 16, 16),)),
    "vit": lambda: (VisionTransformer(), (torch.randn(2, 3, 16, 16),)),
    "moe": lambda: (MixtureOfExperts(), (torch.randn(8, 16),)),
}
