"""Layers that people cut: MLPs of all shapes, embeddings, convolutions, norms, tied weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from parallel_cases.case import Case, drawn, tokens
from shardscope.parallel import Colwise, ModuleInput, ModuleOutput, Replicate, Rowwise, Shard

__all__ = ["PAIR", "Mlp", "layer_cases"]

PAIR = {"up": Colwise(), "down": Rowwise()}


class Mlp(nn.Module):
    """Up, something, down."""

    def __init__(self, width: int = 8, hidden: int = 16, *, bias: bool = True, act: Any = F.gelu):
        super().__init__()
        self.up = nn.Linear(width, hidden, bias=bias)
        self.down = nn.Linear(hidden, width, bias=bias)
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.up(x)))


class Stack(nn.Module):
    """Some MLPs one after the other, with or without a way around each."""

    def __init__(self, num_layers: int, *, is_residual: bool = True) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Mlp() for _ in range(num_layers))
        self.is_residual = is_residual

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x) if self.is_residual else layer(x)
        return x


class Gated(nn.Module):
    """Llama's: a gate, and what it lets through."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 12, bias=False)
        self.up = nn.Linear(8, 12, bias=False)
        self.down = nn.Linear(12, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class FusedGated(nn.Module):
    """Gate and up in one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Linear(8, 24)
        self.down = nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.both(x).chunk(2, -1)
        return self.down(F.silu(gate) * up)


class Shared(nn.Module):
    """One MLP called twice, and its first layer once more by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = Mlp()

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(self.mlp(x)) + self.mlp.up(x)[..., :8]


class Bare(nn.Module):
    """Weights without modules of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(8, 12))
        self.second = nn.Parameter(torch.randn(12, 5))
        self.unused = nn.Parameter(torch.randn(3))
        self.frozen = nn.Parameter(torch.randn(5), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x @ self.first) @ self.second + self.frozen


class Embedded(nn.Module):
    """Tokens to numbers to tokens."""

    def __init__(self, *, is_tied: bool = False, vocabulary: int = 12, **options: Any) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, 8, **options)
        self.head = nn.Linear(8, vocabulary, bias=False)
        if is_tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.embed(ids)))


class Classified(nn.Module):
    """With a cross-entropy over the vocabulary."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.tokens = Embedded(**options)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.tokens(ids).flatten(0, -2), labels.flatten())


class Bag(nn.Module):
    """Embeddings that are summed."""

    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(12, 8, mode="sum")

    def forward(self, ids: Tensor) -> Tensor:
        return self.bag(ids)


class ConvNet(nn.Module):
    """Convolutions with a norm between them, and a linear head."""

    def __init__(self, norm: Callable[[], nn.Module], *, is_training: bool = True) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = norm()
        self.second = nn.Conv2d(8, 4, 3, stride=2)
        self.head = nn.Linear(4, 5)
        self.train(is_training)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.norm(self.first(x)))
        return self.head(F.adaptive_avg_pool2d(self.second(h), 1).flatten(1))


class Depthwise(nn.Module):
    """MobileNet's block."""

    def __init__(self) -> None:
        super().__init__()
        self.expand = nn.Conv2d(4, 8, 1)
        self.depth = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.project = nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.project(F.hardswish(self.depth(F.hardswish(self.expand(x)))))


class Unet(nn.Module):
    """Down, across, up again, with what was on the way down."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Conv2d(2, 8, 3, padding=1)
        self.down = nn.Conv2d(8, 12, 3, stride=2, padding=1)
        self.norm = nn.GroupNorm(2, 12)
        self.middle = nn.Conv2d(12, 12, 3, padding=1)
        self.up = nn.ConvTranspose2d(12, 8, 2, stride=2)
        self.leave = nn.Conv2d(16, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        first = F.silu(self.enter(x))
        low = F.silu(self.norm(self.down(first)))
        low = low + self.middle(low)
        return self.leave(torch.cat([F.interpolate(first, scale_factor=1), self.up(low)], 1))


class Normed(nn.Module):
    """A norm over what a column-wise layer makes."""

    def __init__(self, norm: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.norm = norm()
        self.down = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.relu(self.norm(self.up(x))))


class Experts(nn.Module):
    """All experts on all tokens, weighed by a router that keeps the best two."""

    def __init__(self, num_experts: int = 4) -> None:
        super().__init__()
        self.router = nn.Linear(8, num_experts, bias=False)
        self.up = nn.Parameter(torch.randn(num_experts, 8, 12) * 0.3)
        self.down = nn.Parameter(torch.randn(num_experts, 12, 8) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.router(x).softmax(-1)
        best, which = scores.topk(2, -1)
        weights = torch.zeros_like(scores).scatter(-1, which, best / best.sum(-1, keepdim=True))
        hidden = F.silu(torch.einsum("btd,edf->betf", x, self.up))
        return torch.einsum("betf,efd,bte->btd", hidden, self.down, weights)


class Recurrent(nn.Module):
    """A cell by hand, unrolled."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(4, 8)
        self.again = nn.Linear(8, 8)
        self.leave = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        state = x.new_zeros(x.shape[0], 8)
        for now in x.unbind(1):
            state = torch.tanh(self.enter(now) + self.again(state))
        return self.leave(state)


def layer_cases() -> Iterator[Case]:
    yield from _mlps()
    yield from _embeddings()
    yield from _convolutions()
    yield from _others()


def _mlps() -> Iterator[Case]:
    one, both = {"all_reduce": 1}, {"all_reduce": 1}
    for shape in ((4, 8), (8,), (2, 3, 8), (2, 2, 3, 8)):
        name = f"mlp of a {len(shape)}-d input"
        give = lambda shape=shape: (drawn(*shape),)  # noqa: E731
        yield Case(name, Mlp, give, PAIR, counts=one, joint_counts=both)
    mesh_of = {
        "even": ("tp=4", 16),
        "uneven": ("tp=3", 10),
        "some ranks empty": ("tp=4", 5),
        "smaller than the world": ("tp=4", 2),
    }
    for what, (mesh, hidden) in mesh_of.items():
        for bias in (True, False):
            name = f"mlp with {'' if bias else 'no '}bias, hidden {what}"
            yield Case(
                name,
                lambda h=hidden, b=bias: Mlp(hidden=h, bias=b),
                lambda: (drawn(4, 8),),
                PAIR,
                mesh=mesh,
                counts=one,
                joint_counts=both,
            )
    for n in (2, 4):
        plan = {f"layers.*.{key}": style for key, style in PAIR.items()}
        counts = {"counts": {"all_reduce": n}, "joint_counts": {"all_reduce": 2 * n - 1}}
        yield Case(f"{n} mlps", lambda n=n: Stack(n), lambda: (drawn(4, 8),), plan, **counts)
        make = lambda n=n: Stack(n, is_residual=False)  # noqa: E731
        yield Case(f"{n} mlps in a row", make, lambda: (drawn(4, 8),), plan, **counts)
    give = lambda: (drawn(2, 3, 8),)  # noqa: E731
    yield Case("gated mlp", Gated, give, {"gate": Colwise(), **PAIR}, counts=one, joint_counts=both)
    yield Case("gated mlp on 5 ranks", Gated, give, {"gate": Colwise(), **PAIR}, mesh="tp=5")
    yield Case(
        "fused gated mlp",
        FusedGated,
        give,
        {"both": Colwise(fused=2), "down": Rowwise()},
        counts=one,
        joint_counts=both,
    )
    yield Case(
        "fused weight cut as if it were one",
        FusedGated,
        give,
        {"both": Colwise(), "down": Rowwise()},
    )
    yield Case("mlp that is called twice", Shared, give, {f"mlp.{k}": v for k, v in PAIR.items()})
    yield Case(
        "weights without modules",
        Bare,
        lambda: (drawn(4, 8),),
        {"first": Shard(1), "second": Shard(0)},
    )
    yield Case(
        "weights cut the other way",
        Bare,
        lambda: (drawn(4, 8),),
        {"first": Shard(0), "second": Shard(1)},
    )
    yield Case("column after column", Mlp, give, {"up": Colwise(), "down": Colwise()})
    yield Case("row after row", Mlp, give, {"up": Rowwise(), "down": Rowwise()})
    yield Case("row after column", Mlp, give, {"up": Rowwise(), "down": Colwise()})
    yield Case("only a column", Mlp, give, {"up": Colwise()})
    yield Case("only a row", Mlp, give, {"down": Rowwise()})
    yield Case("only a bias", Mlp, give, {"up.bias": Shard(0)})
    yield Case(
        "gathered after a column",
        Mlp,
        give,
        {"up": Colwise(output=Replicate())},
        counts={"all_gather_into_tensor": 1},
    )
    yield Case("pins around a module", Mlp, give, {**PAIR, "": ModuleInput(Shard(0))}, counts=None)
    yield Case(
        "an output left cut",
        Mlp,
        give,
        {"up": Colwise(), "down": [Colwise(), ModuleOutput(Shard(-1))]},
        outputs={0: Shard(-1)},
    )
    yield Case("an input that comes cut", Mlp, give, {"up": Rowwise()}, inputs={"x": Shard(-1)})
    yield Case("in single precision", Mlp, give, PAIR, dtype=torch.float32, tolerance=1e-5)
    yield Case("in bfloat16", Mlp, give, PAIR, dtype=torch.bfloat16, tolerance=5e-2)
    yield Case("in half precision", Mlp, give, PAIR, dtype=torch.float16, tolerance=5e-3)


def _embeddings() -> Iterator[Case]:
    give = lambda: (tokens(2, 5),)  # noqa: E731
    rows, columns = {"embed": Rowwise()}, {"embed": Colwise()}
    yield Case("embedding cut by row", Embedded, give, rows, counts={"all_reduce": 1})
    yield Case("embedding cut by row, unevenly", Embedded, give, rows, mesh="tp=5")
    yield Case("embedding cut by column", Embedded, give, columns)
    yield Case("embedding with padding", lambda: Embedded(padding_idx=3), give, rows)
    yield Case(
        "embedding and head cut", Embedded, give, {**rows, "head": Colwise(output=Replicate())}
    )
    tied = {**rows, "head": Colwise()}
    yield Case("tied embedding and head", lambda: Embedded(is_tied=True), give, tied)
    yield Case("tied, on three", lambda: Embedded(is_tied=True), give, tied, mesh="tp=3")
    yield Case("tied, only the embedding planned", lambda: Embedded(is_tied=True), give, rows)
    yield Case("bag of embeddings", Bag, give, {"bag": Colwise()})
    yield Case("bag of embeddings by row", Bag, give, {"bag": Rowwise()})
    plan = {"tokens.embed": Rowwise(), "tokens.head": Colwise(output=Shard(-1))}
    labelled = lambda: (tokens(2, 5), tokens(2, 5))  # noqa: E731
    for name, options in {"": {}, ", tied": {"is_tied": True}}.items():
        make = lambda options=options: Classified(**options)  # noqa: E731
        yield Case(f"cross-entropy over a cut vocabulary{name}", make, labelled, plan)
        yield Case(
            f"cross-entropy over a cut vocabulary on five{name}", make, labelled, plan, mesh="tp=5"
        )
    some = lambda: (tokens(2, 5), tokens(2, 5).masked_fill(torch.rand(2, 5) > 0.5, -100))  # noqa: E731
    yield Case("cross-entropy over a cut vocabulary, some ignored", Classified, some, plan)


def _convolutions() -> Iterator[Case]:
    give = lambda: (drawn(4, 3, 8, 8),)  # noqa: E731
    norms: dict[str, Any] = {
        "batch norm": lambda: nn.BatchNorm2d(8),
        "batch norm without statistics": lambda: nn.BatchNorm2d(8, track_running_stats=False),
        "group norm": lambda: nn.GroupNorm(4, 8),
        "instance norm": lambda: nn.InstanceNorm2d(8, affine=True, track_running_stats=True),
    }
    plan = {"first": Colwise(), "norm": Colwise(), "second": Rowwise()}
    for name, norm in norms.items():
        yield Case(f"convolutions and {name}", lambda n=norm: ConvNet(n), give, plan)
    still = lambda: ConvNet(norms["batch norm"], is_training=False)  # noqa: E731
    yield Case("convolutions and batch norm at rest", still, give, plan, counts={"all_reduce": 1})
    batch = {"x": {"dp": Shard(0)}}
    yield Case(
        "convolutions on cut data",
        lambda: ConvNet(norms["batch norm"]),
        give,
        {},
        mesh="dp=2",
        inputs=batch,
    )
    yield Case(
        "convolutions on a 2-d mesh",
        lambda: ConvNet(norms["batch norm"]),
        give,
        plan,
        mesh="dp=2,tp=2",
        inputs=batch,
    )
    yield Case(
        "convolutions cut in three", lambda: ConvNet(norms["batch norm"]), give, plan, mesh="tp=3"
    )
    yield Case(
        "convolutions cut along rows of pixels",
        lambda: ConvNet(norms["group norm"]),
        give,
        {},
        inputs={"x": Shard(2)},
    )
    block = {"expand": Colwise(), "depth": Colwise(), "project": Rowwise()}
    yield Case("depthwise convolutions", Depthwise, lambda: (drawn(2, 4, 5, 5),), block)
    plan = {
        "enter": Colwise(),
        "down": Rowwise(),
        "middle": Colwise(),
        "up": Rowwise(),
        "leave": Rowwise(),
    }
    yield Case("u-net", Unet, lambda: (drawn(2, 2, 8, 8),), plan)
    yield Case(
        "u-net on cut data",
        Unet,
        lambda: (drawn(2, 2, 8, 8),),
        plan,
        mesh="dp=2,tp=2",
        inputs=batch,
    )


def _others() -> Iterator[Case]:
    give = lambda: (drawn(4, 8),)  # noqa: E731
    norms: dict[str, Any] = {
        "layer norm": lambda: nn.LayerNorm(16),
        "layer norm without weights": lambda: nn.LayerNorm(16, elementwise_affine=False),
        "rms norm": lambda: nn.RMSNorm(16, eps=1e-6),
        "batch norm": lambda: nn.BatchNorm1d(16),
        "group norm": lambda: nn.GroupNorm(4, 16),
        "prelu": lambda: nn.PReLU(16),
    }
    for name, norm in norms.items():
        yield Case(f"{name} between a column and a row", lambda n=norm: Normed(n), give, PAIR)
        if "without" not in name:
            yield Case(
                f"{name} cut with its layers",
                lambda n=norm: Normed(n),
                give,
                {**PAIR, "norm": Shard(0)},
            )
    give = lambda: (drawn(2, 3, 8),)  # noqa: E731
    for name, plan in {
        "by expert": {"up": Shard(0), "down": Shard(0)},
        "inside": {"up": Shard(2), "down": Shard(1)},
        "with the router": {"router": Colwise(), "up": Shard(0), "down": Shard(0)},
    }.items():
        yield Case(f"experts cut {name}", Experts, give, plan)
        yield Case(f"experts cut {name} on three", Experts, give, plan, mesh="tp=3")
    yield Case(
        "a cell unrolled",
        Recurrent,
        lambda: (drawn(2, 3, 4),),
        {"enter": Colwise(), "again": Colwise(), "leave": Rowwise()},
    )
