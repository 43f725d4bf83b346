"""The models of the correct programs, with their batches and losses.

Every model is called as `model(batch)` and returns what its family's loss takes.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

VOCAB, WIDTH, LENGTH = 32, 8, 8
Batch = dict[str, Tensor]


class MLP(nn.Module):
    """Two layers and a head; with `is_checkpointed` the layers run again in backward."""

    def __init__(self, *, dropout: float = 0.0, is_checkpointed: bool = False) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4)
        self.dropout = nn.Dropout(dropout)
        self.is_checkpointed = is_checkpointed

    def block(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(F.gelu(self.up(x))))

    def forward(self, batch: Batch) -> Tensor:
        x = batch["x"]
        x = (
            checkpoint(self.block, x, use_reentrant=False)
            if self.is_checkpointed
            else self.block(x)
        )
        return self.head(self.norm(x))


class LowRank(nn.Module):
    """A frozen linear layer with a trainable change of low rank."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(rank, base.in_features) * 0.1)
        self.b = nn.Parameter(torch.randn(base.out_features, rank) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.a.T @ self.b.T


class LowRankMLP(MLP):
    """An MLP of which only changes of low rank, and the head, are trained."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = LowRank(self.up), LowRank(self.down)
        self.norm.requires_grad_(False)


class BatchNorm(nn.BatchNorm2d):
    """Batch norm over the batches of all ranks of `group`, if it is set."""

    group: Any = None

    def forward(self, x: Tensor) -> Tensor:
        if self.group is None or not self.training:
            return super().forward(x)
        from torch.distributed.nn.functional import all_reduce

        sums = torch.stack([x.sum((0, 2, 3)), (x * x).sum((0, 2, 3))])
        count = torch.full((1, x.shape[1]), x.numel() / x.shape[1], dtype=x.dtype)
        total, squares, number = all_reduce(torch.cat([sums, count]), group=self.group).unbind()
        mean = total / number
        variance = squares / number - mean * mean
        with torch.no_grad():
            unbiased = variance * number / (number - 1)
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(unbiased, self.momentum)
            self.num_batches_tracked.add_(1)
        scale = self.weight * (variance + self.eps).rsqrt()
        return (x - mean[:, None, None]) * scale[:, None, None] + self.bias[:, None, None]


class ConvNet(nn.Module):
    """Convolutions with batch norm or group norm, for images of 6 × 6."""

    def __init__(self, *, norm: str = "batch") -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.norm1, self.norm2 = (
            (BatchNorm(4), BatchNorm(4))
            if norm == "batch"
            else (nn.GroupNorm(2, 4), nn.GroupNorm(2, 4))
        )
        self.head = nn.Linear(4, 4)

    def forward(self, batch: Batch) -> Tensor:
        x = F.relu(self.norm1(self.conv1(batch["x"])))
        x = F.relu(self.norm2(self.conv2(x)))
        return self.head(x.mean((2, 3)))


class Recurrent(nn.Module):
    """An LSTM or a GRU over a sequence of vectors."""

    def __init__(self, kind: type[nn.Module] = nn.LSTM) -> None:
        super().__init__()
        self.rnn = kind(WIDTH, 8, batch_first=True)
        self.head = nn.Linear(8, 4)

    def forward(self, batch: Batch) -> Tensor:
        outputs, _ = self.rnn(batch["x"])
        return self.head(outputs[:, -1])


class CausalMixing(nn.Module):
    """Attention of each position to those before it."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
        return attend(q, k, v, positions, positions)


def attend(q: Tensor, k: Tensor, v: Tensor, to: Tensor, of: Tensor) -> Tensor:
    """Causal attention of queries at positions `to` to keys at positions `of`."""
    scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    hidden = to[:, None] < of[None, :]
    return scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.mixing = CausalMixing()

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (
            layer(x).view(batch, length, -1, 2).transpose(1, 2)
            for layer in (self.wq, self.wk, self.wv)
        )
        y = self.mixing(q, k, v, positions)
        return self.wo(y.transpose(1, 2).reshape(batch, length, -1))


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Experts(nn.Module):
    """Experts with stacked weights, each applied to its tokens; none is dropped."""

    def __init__(self, num_experts: int = 4) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(num_experts, WIDTH, 8) * 0.3)
        self.down = nn.Parameter(torch.randn(num_experts, 8, WIDTH) * 0.3)

    def forward(self, tokens: Tensor, counts: Tensor) -> Tensor:
        """Tokens in the order of their experts, and how many each expert has."""
        parts = tokens.split(counts.tolist())
        return torch.cat(
            [
                F.gelu(part @ up) @ down
                for part, up, down in zip(parts, self.up, self.down, strict=True)
            ]
        )


class LocalDispatch(nn.Module):
    """Calls the experts with tokens in the order of their experts."""

    def forward(self, experts: nn.Module, tokens: Tensor, chosen: Tensor, number: int) -> Tensor:
        order = chosen.argsort(stable=True)
        results = experts(tokens[order], torch.bincount(chosen, minlength=number))
        return torch.empty_like(results).index_copy(0, order, results)


class MixtureOfExperts(nn.Module):
    """Tokens are routed to the `top_k` experts with the largest scores."""

    def __init__(self, num_experts: int = 4, top_k: int = 2) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, num_experts, bias=False)
        self.experts, self.dispatch = Experts(num_experts), LocalDispatch()
        self.num_experts, self.top_k = num_experts, top_k
        self.scores: Tensor | None = None  # of the last call, for the auxiliary loss

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, x.shape[-1])
        scores = self.router(tokens).softmax(-1)
        self.scores = scores
        weights, chosen = scores.topk(self.top_k, -1)
        repeated = tokens.repeat_interleave(self.top_k, 0)
        results = self.dispatch(self.experts, repeated, chosen.reshape(-1), self.num_experts)
        mixed = results.view(len(tokens), self.top_k, -1) * weights[..., None]
        return mixed.sum(1).reshape(x.shape)


class Block(nn.Module):
    def __init__(self, *, has_experts: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(WIDTH), Attention()
        self.norm2 = nn.LayerNorm(WIDTH)
        self.mlp = MixtureOfExperts() if has_experts else FeedForward()
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        x = x + self.dropout(self.attn(self.norm1(x), positions))
        return x + self.dropout(self.mlp(self.norm2(x)))


class GPT(nn.Module):
    """A small language model, which returns logits; a pipeline stage has a part of its layers."""

    def __init__(
        self,
        num_layers: int = 2,
        *,
        is_tied: bool = False,
        has_experts: bool = False,
        dropout: float = 0.0,
        is_checkpointed: bool = False,
    ) -> None:
        super().__init__()
        self.tok = nn.Embedding(VOCAB, WIDTH)
        self.pos = nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleDict(
            {
                str(index): Block(has_experts=has_experts, dropout=dropout)
                for index in range(num_layers)
            }
        )
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        self.is_checkpointed = is_checkpointed
        if is_tied:
            self.head.weight = self.tok.weight

    def forward(self, batch: Batch | Tensor) -> Tensor:
        inputs = batch["tokens"] if isinstance(batch, dict) else batch
        positions = batch.get("positions") if isinstance(batch, dict) else None
        if positions is None:
            positions = torch.arange(inputs.shape[1])
        x, order = inputs, positions if positions.ndim == 1 else positions[0]
        if self.tok is not None:
            x = self.tok(inputs) + self.pos(positions)
        for layer in self.layers.values():
            if self.is_checkpointed:
                x = checkpoint(layer, x, order, use_reentrant=False)
            else:
                x = layer(x, order)
        return x if self.head is None else self.head(self.norm(x))


def make_vectors(size: int, seed: int) -> Batch:
    """A batch for regression, with weights that mask some of its elements."""
    generator = torch.Generator().manual_seed(seed)
    mask = (torch.rand(size, generator=generator) < 0.7).float()
    mask[0] = 1
    return {
        "x": torch.randn(size, WIDTH, generator=generator),
        "y": torch.randn(size, 4, generator=generator),
        "mask": mask,
    }


def make_images(size: int, seed: int) -> Batch:
    """A batch of images for regression."""
    generator = torch.Generator().manual_seed(seed)
    batch = make_vectors(size, seed)
    return {**batch, "x": torch.randn(size, 2, 6, 6, generator=generator)}


def make_sequences(size: int, seed: int) -> Batch:
    """A batch of sequences of vectors for regression."""
    generator = torch.Generator().manual_seed(seed)
    batch = make_vectors(size, seed)
    return {**batch, "x": torch.randn(size, 5, WIDTH, generator=generator)}


def make_tokens(size: int, seed: int) -> Batch:
    """A batch of tokens with the next token as labels, unevenly masked."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, VOCAB, (size, LENGTH + 1), generator=generator)
    lengths = torch.randint(2, LENGTH + 1, (size,), generator=generator)
    mask = (torch.arange(LENGTH)[None] < lengths[:, None]).float()
    return {"tokens": tokens[:, :-1].clone(), "labels": tokens[:, 1:].clone(), "mask": mask}


def sum_squares(outputs: Tensor, batch: Batch) -> Tensor:
    """The loss of regression for each sample."""
    return (outputs - batch["y"]).square().mean(-1)


def cross_entropies(logits: Tensor, batch: Batch) -> Tensor:
    """The loss of each token."""
    losses = F.cross_entropy(logits.flatten(0, -2), batch["labels"].flatten(), reduction="none")
    return losses.view(batch["labels"].shape)
