"""Sizes that stay open: exported at one, run at others, and cut."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.export import Dim

from parallel_cases.attention import QKVO, WAYS, Attention, Fused, FusedByView
from parallel_cases.case import Case, drawn, tokens
from parallel_cases.layers import PAIR, Classified, Mlp, Normed, Stack
from parallel_cases.transformers import (
    LLAMA,
    LLAMA_SEQUENCE,
    LLAMA_VOCABULARY,
    Gpt,
    Llama,
    Loss,
)
from shardscope.parallel import Colwise, Rowwise, Shard

__all__ = ["dynamic_cases"]

AUTO = Dim.AUTO
DATA = {"x": {"dp": Shard(0)}}


class Sizes(nn.Module):
    """Does arithmetic with sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = Mlp()

    def forward(self, x: Tensor) -> Any:
        batch, length, _ = x.shape
        y = self.mlp(x).reshape(batch * length, -1)
        mask = torch.arange(length).expand(batch, length).flatten() < length // 2
        y = y * mask[:, None] / (batch * length + 1)
        first, second = y.view(batch, length, 8).split([1, length - 1], 1)
        padded = F.pad(second, (0, 0, 0, 2)) + first
        return padded, padded.new_ones(batch, 3).sum(-1) + batch, torch.cat([y, y]).mean(0)


class Pooled(nn.Module):
    """An average over a length that is open."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = Mlp()

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        y = self.mlp(x) * keep[..., None]
        return y.sum(1) / keep.sum(1, keepdim=True).clamp(min=1)


def dynamic_cases() -> Iterator[Case]:
    yield from _left_alone()
    yield from _cut()


def _left_alone() -> Iterator[Case]:
    """What is open is not what is cut."""
    give = lambda *shape: lambda: (drawn(*shape),)  # noqa: E731
    batch = {"x": {0: Dim("batch")}}
    yield Case(
        "open batch",
        Mlp,
        give(4, 8),
        PAIR,
        dynamic=batch,
        others=(give(2, 8), give(7, 8)),
        counts={"all_reduce": 1},
    )
    yield Case(
        "open batch, uneven hidden",
        lambda: Mlp(hidden=10),
        give(4, 8),
        PAIR,
        mesh="tp=3",
        dynamic=batch,
        others=(give(3, 8),),
    )
    yield Case(
        "open batch, gathered",
        Mlp,
        give(4, 8),
        {"up": Colwise()},
        dynamic=batch,
        others=(give(5, 8),),
    )
    yield Case(
        "open batch, layer norm over what is cut",
        lambda: Normed(lambda: nn.LayerNorm(16)),
        give(4, 8),
        PAIR,
        dynamic=batch,
        others=(give(5, 8),),
    )
    yield Case(
        "open batch, batch norm",
        lambda: Normed(lambda: nn.BatchNorm1d(16)),
        give(4, 8),
        PAIR,
        dynamic=batch,
        others=(give(6, 8),),
    )
    both = {"x": {0: Dim("batch"), 1: Dim("length")}}
    yield Case(
        "open batch and length",
        lambda: Stack(2),
        give(2, 6, 8),
        {f"layers.*.{k}": v for k, v in PAIR.items()},
        dynamic=both,
        others=(give(3, 5, 8), give(2, 2, 8)),
    )
    yield Case(
        "arithmetic with open sizes",
        Sizes,
        give(2, 6, 8),
        {f"mlp.{k}": v for k, v in PAIR.items()},
        dynamic={"x": {0: AUTO, 1: AUTO}},
        others=(give(4, 9, 8),),
    )
    for name in (
        "by hand, causal",
        "in one op, causal",
        "with rotary positions",
        "with rotary positions in complex numbers",
        "by bmm",
    ):
        make = lambda name=name: Attention(WAYS[name])  # noqa: E731
        how = {"x": {0: Dim("batch"), 1: Dim("length", min=2, max=64)}}
        yield Case(
            f"open batch and length, attention {name}",
            make,
            give(2, 6, 16),
            QKVO,
            dynamic=how,
            others=(give(3, 4, 16),),
            counts={"all_reduce": 1},
            trains="by hand" in name,
            # Before, the sizes of its views are compared, for which the length has to be known.
            since=(2, 13) if name == "by bmm" else (2, 11),
        )
    for name, make in (("fused", Fused), ("fused, seen as three", FusedByView)):
        plan = {"qkv": Colwise(fused=3), "out": Rowwise()}
        yield Case(
            f"open batch and length, attention {name}",
            make,
            give(2, 6, 16),
            plan,
            dynamic=both,
            others=(give(3, 4, 16),),
            counts={"all_reduce": 1},
            trains=False,
        )
    text = lambda *shape: lambda: (tokens(*shape), tokens(*shape))  # noqa: E731
    open_text = {
        one: {0: Dim("batch"), 1: Dim("length", min=2, max=8)} for one in ("ids", "labels")
    }
    for name, plan in {"": LLAMA, ", vocabulary cut": LLAMA_VOCABULARY}.items():
        yield Case(
            f"open llama{name}",
            lambda: Loss(Llama(1)),
            text(2, 6),
            _lm(plan),
            dynamic=open_text,
            others=(text(3, 5),),
            trains=False,
        )
    gpt = {"layers.*.attn.qkv": Colwise(fused=3), "layers.*.attn.out": Rowwise()}
    yield Case(
        "open gpt",
        lambda: Gpt(1),
        lambda: (tokens(2, 6),),
        gpt,
        dynamic={"ids": {0: AUTO, 1: Dim("length", min=2, max=8)}},
        others=(lambda: (tokens(3, 4),),),
        trains=False,
    )


def _cut() -> Iterator[Case]:
    """What is open is cut: it has to divide, and the pieces are then open."""
    give = lambda *shape: lambda: (drawn(*shape),)  # noqa: E731
    batch = {"x": {0: AUTO}}
    for mesh in ("dp=2", "dp=2,tp=2", "tp=2,dp=2"):
        plan = {} if mesh == "dp=2" else PAIR
        yield Case(
            f"open batch cut: {mesh}",
            Mlp,
            give(4, 8),
            plan,
            mesh=mesh,
            inputs=DATA,
            dynamic=batch,
            others=(give(8, 8), give(2, 8)),
            trains=mesh == "dp=2,tp=2",
        )
    yield Case(
        "open batch cut, fully sharded",
        Mlp,
        give(4, 8),
        {"**": {"dp": Shard(0)}},
        mesh="dp=2",
        inputs=DATA,
        dynamic=batch,
        others=(give(6, 8),),
    )
    yield Case(
        "open batch cut, batch norm",
        lambda: Normed(lambda: nn.BatchNorm1d(16)),
        give(4, 8),
        {},
        mesh="dp=2",
        inputs=DATA,
        dynamic=batch,
        others=(give(8, 8),),
    )
    yield Case(
        "open batch cut, arithmetic with sizes",
        Sizes,
        give(2, 6, 8),
        {},
        mesh="dp=2",
        inputs=DATA,
        dynamic={"x": {0: AUTO, 1: AUTO}},
        others=(give(4, 4, 8),),
    )
    where = {"x": {"dp": Shard(0)}, "keep": {"dp": Shard(0)}}
    sizes = {"x": {0: AUTO, 1: AUTO}, "keep": {0: AUTO, 1: AUTO}}
    yield Case(
        "open batch cut, mean over open length",
        Pooled,
        _masked(2, 6),
        {},
        mesh="dp=2",
        inputs=where,
        dynamic=sizes,
        others=(_masked(4, 5),),
    )
    length = {"x": {"cp": Shard(1)}, "keep": {"cp": Shard(1)}}
    yield Case(
        "open length cut, mean over it",
        Pooled,
        _masked(2, 6),
        {},
        mesh="cp=2",
        inputs=length,
        dynamic=sizes,
        others=(_masked(3, 4),),
    )
    yield Case(
        "open batch and length cut",
        Mlp,
        give(2, 6, 8),
        PAIR,
        mesh="dp=2,tp=2,cp=2",
        inputs={"x": {"dp": Shard(0), "cp": Shard(1)}},
        dynamic={"x": {0: AUTO, 1: AUTO}},
        others=(give(4, 4, 8),),
        trains=False,
    )
    make = lambda: Attention(WAYS["in one op, causal"])  # noqa: E731
    yield Case(
        "open length cut, attention",
        make,
        give(2, 6, 16),
        {},
        mesh="cp=2",
        inputs={"x": {"cp": Shard(1)}},
        dynamic={"x": {0: AUTO, 1: Dim("length", min=2, max=64)}},
        others=(give(3, 4, 16),),
    )
    text = lambda *shape: lambda: (tokens(*shape), tokens(*shape))  # noqa: E731
    open_text = {one: {0: AUTO, 1: AUTO} for one in ("ids", "labels")}
    yield Case(
        "open llama with its sequence cut",
        lambda: Loss(Llama(1)),
        text(2, 6),
        _lm(LLAMA_SEQUENCE),
        dynamic=open_text,
        others=(text(2, 8),),
        trains=False,
    )
    data = {"ids": {"dp": Shard(0)}, "labels": {"dp": Shard(0)}}
    yield Case(
        "open llama on cut data, vocabulary cut",
        lambda: Loss(Llama(1)),
        text(2, 6),
        _lm(LLAMA_VOCABULARY),
        mesh="dp=2,tp=2",
        inputs=data,
        dynamic=open_text,
        others=(text(4, 5),),
        trains=False,
    )
    yield Case(
        "open tokens, vocabulary cut",
        Classified,
        text(2, 6),
        {"tokens.embed": Rowwise(), "tokens.head": Colwise(output=Shard(-1))},
        dynamic=open_text,
        others=(text(3, 4),),
    )


def _lm(plan: dict[str, Any]) -> dict[str, Any]:
    return {f"lm.{name}": style for name, style in plan.items()}


def _masked(*shape: int) -> Callable[[], tuple[Tensor, Tensor]]:
    return lambda: (drawn(*shape, 8), (torch.rand(shape) > 0.3).to(torch.get_default_dtype()))
