"""A small Llama-like decoder, dense or with experts, as trainers define it; cases shard it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

IGNORED = -100


@dataclass
class Config:
    """The sizes of a decoder. With experts, layers from `first_moe_layer` on have them."""

    dim: int = 16
    num_layers: int = 2
    num_heads: int = 4
    num_kv_heads: int = 2
    hidden_dim: int = 32
    vocab_size: int = 64
    length: int = 16
    is_tied: bool = False
    num_experts: int = 0
    top_k: int = 2
    expert_dim: int = 16
    first_moe_layer: int = 0
    has_shared_expert: bool = False
    is_scored_before_experts: bool = False


def rotate(x: Tensor, positions: Tensor) -> Tensor:
    """Rotary embedding of (batch, sequence, heads, head dim)."""
    half = x.shape[-1] // 2
    frequencies = 100.0 ** (-torch.arange(half, dtype=x.dtype) / half)
    angles = positions.to(x.dtype)[..., None, None] * frequencies
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], -1)


class InnerAttention(nn.Module):
    """Attention of (batch, sequence, heads, head dim); heads share keys and values in groups."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
        """`mask` is True where a query sees a key: (sequence, keys) or (batch, sequence, keys)."""
        k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        mask = mask if mask.ndim == 2 else mask[:, None]
        scores = (q @ k.transpose(-1, -2) * scale).masked_fill(~mask, float("-inf"))
        return (scores.softmax(-1) @ v).transpose(1, 2)


class Attention(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.head_dim = config.dim // config.num_heads
        kv_dim = config.num_kv_heads * self.head_dim
        self.wq = nn.Linear(config.dim, config.dim, bias=False)
        self.wk = nn.Linear(config.dim, kv_dim, bias=False)
        self.wv = nn.Linear(config.dim, kv_dim, bias=False)
        self.wo = nn.Linear(config.dim, config.dim, bias=False)
        self.inner_attention = InnerAttention()

    def forward(self, x: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (-1, self.head_dim)) for layer in (self.wq, self.wk, self.wv)
        )
        q, k = rotate(q, positions), rotate(k, positions)
        y = self.inner_attention(q, k, v, mask, self.head_dim**-0.5)
        return self.wo(y.flatten(-2))


class FeedForward(nn.Module):
    def __init__(self, dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(dim, hidden_dim, bias=False)
        self.w2 = nn.Linear(hidden_dim, dim, bias=False)
        self.w3 = nn.Linear(dim, hidden_dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class GroupedExperts(nn.Module):
    """Experts with stacked weights; tokens come sorted by expert, with the number for each."""

    def __init__(self, num_experts: int, dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(num_experts, dim, hidden_dim) * dim**-0.5)
        self.w2 = nn.Parameter(torch.randn(num_experts, hidden_dim, dim) * hidden_dim**-0.5)
        self.w3 = nn.Parameter(torch.randn(num_experts, dim, hidden_dim) * dim**-0.5)

    def forward(self, tokens: Tensor, counts: Tensor) -> Tensor:
        weights = zip(self.w1, self.w2, self.w3, strict=True)
        parts = zip(tokens.split(counts.tolist()), weights, strict=True)
        return torch.cat([(F.silu(x @ w1) * (x @ w3)) @ w2 for x, (w1, w2, w3) in parts])


class Router(nn.Module):
    """Scores of the experts for each token: (tokens, top_k), with the chosen experts."""

    def __init__(self, config: Config, *, has_bias: bool = False) -> None:
        super().__init__()
        self.gate = nn.Linear(config.dim, config.num_experts, bias=has_bias)
        self.top_k = config.top_k

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.gate(x).softmax(-1)
        return scores.topk(self.top_k, -1)


class MoE(nn.Module):
    """Routed experts, and perhaps one that takes all tokens."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.router = Router(config)
        self.experts = GroupedExperts(config.num_experts, config.dim, config.expert_dim)
        self.shared_expert = (
            FeedForward(config.dim, config.expert_dim) if config.has_shared_expert else None
        )
        self.num_experts, self.top_k = config.num_experts, config.top_k
        self.is_scored_before_experts = config.is_scored_before_experts

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, x.shape[-1])
        scores, chosen = self.router(tokens)
        order = chosen.flatten().argsort(stable=True)
        counts = chosen.flatten().bincount(minlength=self.num_experts)
        routed = tokens[order // self.top_k]
        sorted_scores = scores.flatten()[order][:, None]
        if self.is_scored_before_experts:
            results = self.experts(routed * sorted_scores, counts)
        else:
            results = self.experts(routed, counts) * sorted_scores
        y = torch.zeros_like(tokens).index_add(0, order // self.top_k, results)
        if self.shared_expert is not None:
            y = y + self.shared_expert(tokens)
        return y.view_as(x)


class Block(nn.Module):
    def __init__(self, config: Config, *, has_experts: bool) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim, eps=1e-5)
        self.attention = Attention(config)
        self.ffn_norm = nn.RMSNorm(config.dim, eps=1e-5)
        if has_experts:
            self.moe = MoE(config)
        else:
            self.feed_forward = FeedForward(config.dim, config.hidden_dim)

    def forward(self, x: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), positions, mask)
        ffn = self.moe if hasattr(self, "moe") else self.feed_forward
        return x + ffn(self.ffn_norm(x))


class Decoder(nn.Module):
    """Tokens to logits. Positions and the mask of attention are causal unless they are passed."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleDict(
            {
                str(index): Block(
                    config,
                    has_experts=config.num_experts > 0 and index >= config.first_moe_layer,
                )
                for index in range(config.num_layers)
            }
        )
        self.norm = nn.RMSNorm(config.dim, eps=1e-5)
        self.output = nn.Linear(config.dim, config.vocab_size, bias=False)
        if config.is_tied:
            self.output.weight = self.tok_embeddings.weight

    def forward(
        self, tokens: Tensor, positions: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensor:
        if positions is None:
            positions = torch.arange(tokens.shape[1])
        if mask is None:
            mask = positions[..., :, None] >= positions[..., None, :]
        x = self.tok_embeddings(tokens)
        for layer in self.layers.values():
            x = layer(x, positions, mask)
        return self.output(self.norm(x))


def make_batch(
    config: Config, num_samples: int = 8, *, has_padding: bool = False
) -> tuple[Tensor, Tensor]:
    """Tokens and the labels of a batch; with padding, samples have fewer and fewer labels."""
    tokens = torch.randint(0, config.vocab_size, (num_samples, config.length + 1))
    inputs, labels = tokens[:, :-1].clone(), tokens[:, 1:].clone()
    if has_padding:
        for index in range(num_samples):
            labels[index, config.length - index * config.length // (num_samples + 1) :] = IGNORED
    return inputs, labels


def cross_entropy(logits: Tensor, labels: Tensor, reduction: str = "mean") -> Tensor:
    """Cross entropy of all labels that are not ignored."""
    return F.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction=reduction
    )
