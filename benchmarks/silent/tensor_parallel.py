"""Tensor parallelism of the decoder by hand, on plain tensors; right, unless a case changes it."""

from __future__ import annotations

from typing import Any

from benchmarks.silent.correct_by_hand import Copy, Group, Reduce, keep_part
from benchmarks.silent.decoder import Decoder
from torch import nn


def shard_pair(module: nn.Module, columns: list[str], rows: str, group: Group) -> None:
    """Shard linear layers whose outputs, and the one whose inputs, are on different ranks."""

    def enter(_: nn.Module, inputs: Any) -> Any:
        return (Copy.apply(inputs[0], group), *inputs[1:])

    def leave(_: nn.Module, inputs: Any, output: Any) -> Any:
        return Reduce.apply(output, group)

    for name in columns:
        keep_part(getattr(module, name), "weight", 0, group)
    keep_part(getattr(module, rows), "weight", 1, group)
    module.register_forward_pre_hook(enter)
    getattr(module, rows).register_forward_hook(leave)


def shard_decoder(model: Decoder, group: Group) -> None:
    """Shard the attention and the feed-forward of each layer, which has no experts."""
    for layer in model.layers.values():
        shard_pair(layer.attention, ["wq", "wk", "wv"], "wo", group)
        shard_pair(layer.feed_forward, ["w1", "w3"], "w2", group)


def is_sharded(name: str) -> bool:
    """Whether a parameter of the decoder is sharded by `shard_decoder`."""
    return "attention.w" in name or "feed_forward.w" in name
