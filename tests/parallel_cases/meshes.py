"""Meshes of one, two and three axes, data cut beside weights, and weights cut as FSDP cuts them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from parallel_cases.case import Case, drawn, tokens
from parallel_cases.layers import PAIR, ConvNet, Mlp, Stack
from parallel_cases.transformers import LLAMA, LLAMA_VOCABULARY, Gpt, GptBlock, Llama, Loss
from shardscope.parallel import Colwise, Rowwise, Shard

__all__ = ["mesh_cases"]

DATA = {"x": {"dp": Shard(0)}}
TEXT = {"ids": {"dp": Shard(0)}, "labels": {"dp": Shard(0)}}


class Mean(nn.Module):
    """A loss over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = Mlp()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.mlp(x), y)


class Weighed(nn.Module):
    """A loss that divides by what the data sum up to."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = Mlp()

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        each = self.mlp(x).pow(2).mean(-1)
        return (each * weight).sum() / weight.sum()


class Contrast(nn.Module):
    """Every sample against every other."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = Mlp()

    def forward(self, x: Tensor) -> Tensor:
        z = F.normalize(self.mlp(x), dim=-1)
        return (z @ z.T).logsumexp(-1).mean()


def mesh_cases() -> Iterator[Case]:
    yield from _data_parallel()
    yield from _fully_sharded()
    yield from _several_axes()


def _data_parallel() -> Iterator[Case]:
    give = lambda: (drawn(4, 8),)  # noqa: E731
    yield Case("data in two", Mlp, give, {}, mesh="dp=2", inputs=DATA, counts={})
    yield Case("data in three, unevenly", Mlp, give, {}, mesh="dp=3", inputs=DATA)
    yield Case("more ranks than data", Mlp, lambda: (drawn(2, 8),), {}, mesh="dp=4", inputs=DATA)
    both = lambda: (drawn(4, 8), drawn(4, 8))  # noqa: E731
    yield Case(
        "a mean over data in two",
        Mean,
        both,
        {},
        mesh="dp=2",
        inputs={"x": {"dp": Shard(0)}, "y": {"dp": Shard(0)}},
    )
    yield Case(
        "a mean over uneven data",
        Mean,
        both,
        {},
        mesh="dp=3",
        inputs={"x": {"dp": Shard(0)}, "y": {"dp": Shard(0)}},
    )
    yield Case("only one input cut", Mean, both, {}, mesh="dp=2", inputs=DATA)
    yield Case(
        "a weighed mean over data",
        Weighed,
        lambda: (drawn(4, 8), drawn(4).abs()),
        {},
        mesh="dp=2",
        inputs={"x": {"dp": Shard(0)}, "weight": {"dp": Shard(0)}},
    )
    yield Case("a contrast over data", Contrast, give, {}, mesh="dp=2", inputs=DATA)
    yield Case(
        "an output asked whole",
        Mlp,
        give,
        {},
        mesh="dp=2",
        inputs=DATA,
        outputs={0: {"dp": "replicate"}},
    )
    yield Case(
        "gpt on cut data",
        Gpt,
        lambda: (tokens(4, 6),),
        {},
        mesh="dp=2",
        inputs={"ids": {"dp": Shard(0)}},
    )


def _fully_sharded() -> Iterator[Case]:
    give = lambda: (drawn(4, 8),)  # noqa: E731
    every = {"**": {"dp": Shard(0)}}
    for n in (2, 3):
        yield Case(f"fully sharded on {n}", Mlp, give, every, mesh=f"dp={n}", inputs=DATA)
    yield Case(
        "several mlps fully sharded", lambda: Stack(2), give, every, mesh="dp=2", inputs=DATA
    )
    text = lambda: (tokens(2, 8), tokens(2, 8))  # noqa: E731
    yield Case("llama fully sharded", lambda: Loss(Llama(1)), text, every, mesh="dp=2", inputs=TEXT)
    yield Case(
        "convolutions fully sharded",
        lambda: ConvNet(lambda: nn.BatchNorm2d(8)),
        lambda: (drawn(4, 3, 8, 8),),
        {"first": {"dp": Shard(0)}, "second": {"dp": Shard(0)}, "head": {"dp": Shard(0)}},
        mesh="dp=2",
        inputs=DATA,
    )
    two = {"up": {"tp": Colwise(), "dp": Shard(0)}, "down": {"tp": Rowwise(), "dp": Shard(0)}}
    yield Case(
        "fully sharded beside tensor parallel", Mlp, give, two, mesh="dp=2,tp=2", inputs=DATA
    )
    yield Case(
        "fully sharded beside tensor parallel, uneven",
        lambda: Mlp(hidden=10),
        give,
        two,
        mesh="dp=2,tp=3",
        inputs=DATA,
    )
    yield Case(
        "tensor parallel first, then fully sharded", Mlp, give, two, mesh="tp=2,dp=2", inputs=DATA
    )
    yield Case(
        "replicas of fully sharded",
        Mlp,
        give,
        every,
        mesh="ddp=2,dp=2",
        inputs={"x": {"ddp": Shard(0), "dp": Shard(0)}},
    )


def _several_axes() -> Iterator[Case]:
    give = lambda: (drawn(4, 8),)  # noqa: E731
    text = lambda: (tokens(2, 8), tokens(2, 8))  # noqa: E731
    for mesh in ("tp=1", "dp=1,tp=2", "dp=2,tp=1", "dp=1,tp=1,cp=1"):
        yield Case(
            f"an axis of one: {mesh}",
            Mlp,
            give,
            PAIR,
            mesh=mesh,
            inputs=DATA if "dp" in mesh else None,
        )
    yield Case("two axes", Mlp, give, PAIR, mesh="dp=2,tp=2", inputs=DATA, counts={"all_reduce": 1})
    yield Case("two axes, weights first", Mlp, give, PAIR, mesh="tp=2,dp=2", inputs=DATA)
    yield Case(
        "two axes, both uneven",
        lambda: Mlp(hidden=10),
        lambda: (drawn(5, 8),),
        PAIR,
        mesh="dp=2,tp=3",
        inputs=DATA,
    )
    both = {"up": {"a": Colwise(), "b": Colwise()}, "down": {"a": Rowwise(), "b": Rowwise()}}
    yield Case("one dim cut by two axes", Mlp, give, both, mesh="a=2,b=2")
    yield Case(
        "one dim cut by two axes, unevenly", lambda: Mlp(hidden=10), give, both, mesh="a=2,b=3"
    )
    yield Case(
        "one dim cut by two axes, some ranks empty",
        lambda: Mlp(hidden=5),
        give,
        both,
        mesh="a=2,b=2",
    )
    cross = {"up": {"a": Colwise(), "b": Rowwise()}, "down": {"a": Rowwise(), "b": Colwise()}}
    yield Case("two dims cut by two axes", Mlp, give, cross, mesh="a=2,b=2")
    yield Case(
        "data cut by two axes",
        Mlp,
        give,
        {},
        mesh="a=2,b=2",
        inputs={"x": {"a": Shard(0), "b": Shard(0)}},
    )
    yield Case(
        "data cut by two axes along two dims",
        Mlp,
        lambda: (drawn(2, 4, 8),),
        {},
        mesh="a=2,b=2",
        inputs={"x": {"a": Shard(0), "b": Shard(1)}},
    )
    cube: dict[str, Any] = {
        "mesh": "dp=2,tp=2,cp=2",
        "inputs": {"x": {"dp": Shard(0), "cp": Shard(1)}},
    }
    block = {
        "attn.qkv": Colwise(fused=3),
        "attn.out": Rowwise(),
        "mlp.up": Colwise(),
        "mlp.down": Rowwise(),
    }
    yield Case(
        "a block on three axes", GptBlock, lambda: (drawn(2, 4, 16),), block, **cube, trains=False
    )
    yield Case("an mlp on three axes", Mlp, lambda: (drawn(2, 4, 8),), PAIR, **cube)
    ids = {"ids": {"dp": Shard(0), "cp": Shard(1)}, "labels": {"dp": Shard(0), "cp": Shard(1)}}
    yield Case(
        "llama on three axes",
        lambda: Loss(Llama(1)),
        text,
        {f"lm.{k}": v for k, v in LLAMA.items()},
        mesh="dp=2,tp=2,cp=2",
        inputs=ids,
        trains=False,
    )
    vocabulary = {f"lm.{k}": v for k, v in LLAMA_VOCABULARY.items()}
    yield Case(
        "llama on two axes, vocabulary cut",
        lambda: Loss(Llama(1)),
        text,
        vocabulary,
        mesh="tp=2,dp=2",
        inputs=TEXT,
        trains=False,
    )
    yield Case(
        "experts on one axis, their insides on another",
        Expert,
        lambda: (drawn(2, 3, 8),),
        {"up": {"ep": Shard(0), "tp": Shard(2)}, "down": {"ep": Shard(0), "tp": Shard(1)}},
        mesh="ep=2,tp=2",
    )


class Expert(nn.Module):
    """All experts on all tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(8, 4)
        self.up = nn.Parameter(nn.Linear(8, 48).weight.detach().view(4, 8, 12))
        self.down = nn.Parameter(nn.Linear(8, 48).weight.detach().view(4, 12, 8))

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.silu(x[:, None] @ self.up)
        weights = self.router(x).softmax(-1).transpose(1, 2)[..., None]
        return (hidden @ self.down * weights).sum(1)
