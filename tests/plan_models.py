"""Models that plans are tried on, small enough to read."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Block", "Decoder", "Zoo", "decoder_program"]


class Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.wo = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        return x + self.wo(q * k + v)


class Decoder(nn.Module):
    """Blocks between an embedding and a head, which are one tensor."""

    def __init__(self, *, dim: int = 8, num_layers: int = 3, is_tied: bool = True) -> None:
        super().__init__()
        self.tok = nn.Embedding(16, dim)
        self.layers = nn.ModuleList(Block(dim) for _ in range(num_layers))
        self.head = nn.Linear(dim, 16, bias=False)
        self.register_buffer("scale", torch.ones(dim), persistent=False)
        if is_tied:
            self.head.weight = self.tok.weight

    def forward(self, batch: dict[str, Tensor], bias: Tensor | None = None) -> dict[str, Any]:
        x = self.tok(batch["ids"]) * self.scale
        for layer in self.layers:
            x = layer(x)
        logits = self.head(x)
        return {"logits": logits if bias is None else logits + bias, "rest": (x, None)}


class Zoo(nn.Module):
    """One module of each kind that styles know, never called."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 16)
        self.embedding = nn.Embedding(32, 8)
        self.bag = nn.EmbeddingBag(32, 8)
        self.bilinear = nn.Bilinear(4, 4, 8)
        self.conv = nn.Conv2d(4, 8, 3)
        self.deconv = nn.ConvTranspose1d(4, 8, 3)
        self.layer_norm = nn.LayerNorm(8)
        self.image_norm = nn.LayerNorm((4, 8))
        self.rms_norm = nn.RMSNorm(8)
        self.batch_norm = nn.BatchNorm2d(8)
        self.group_norm = nn.GroupNorm(2, 8)
        self.attention = nn.MultiheadAttention(8, 4)
        self.lstm = nn.LSTM(4, 4)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))
        self.temperature = nn.Parameter(torch.ones(()))


def decoder_program(*, strict: bool = False, **sizes: Any) -> torch.export.ExportedProgram:
    ids = torch.zeros(2, 4, dtype=torch.long)
    return torch.export.export(Decoder(**sizes), ({"ids": ids},), strict=strict)
