"""Buffers that change, constants, weights that are written to, and code that does not train."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from parallel_cases.case import Case, drawn, tokens
from parallel_cases.layers import PAIR, Mlp
from shardscope.parallel import Colwise, Rowwise, Shard

__all__ = ["state_cases"]


class Around(Mlp):
    """Something is done to the hidden values, with a state."""

    def __init__(self, **buffers: Tensor) -> None:
        super().__init__()
        for name, buffer in buffers.items():
            self.register_buffer(name, buffer, persistent=not name.startswith("own"))

    def forward(self, x: Tensor) -> Any:
        return self.down(self.change(self.up(x)))

    def change(self, h: Tensor) -> Tensor:
        raise NotImplementedError


class Scaled(Around):
    def change(self, h: Tensor) -> Tensor:
        return h * self.scale + self.own_shift


class Counting(Around):
    def change(self, h: Tensor) -> Tensor:
        self.count += 1
        return h * self.count


class Averaging(Around):
    """A running mean of what is cut."""

    def change(self, h: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean.mul_(0.9).add_(h.mean(0), alpha=0.1)
        return h - self.mean


class AveragingWhole(Around):
    """A buffer that is whole takes what is cut."""

    def change(self, h: Tensor) -> Tensor:
        self.own_last.copy_(h.detach().amax(0))
        return h + self.own_last.roll(1)


class Remembering(Around):
    """A cache, written by slice and read again."""

    def change(self, h: Tensor) -> Tensor:
        self.cache[:, 1:3] = h[:, None].expand(-1, 2, -1).detach()
        return h + self.cache.mean(1)


class RememberingByIndex(Around):
    def change(self, h: Tensor) -> Tensor:
        self.cache.index_put_((torch.arange(4), torch.tensor([1, 0, 2, 3])), h.detach())
        self.cache.index_fill_(1, torch.tensor([4]), 0.5)
        return h + self.cache.sum(1)


class RememberingByScatter(Around):
    def change(self, h: Tensor) -> Tensor:
        self.cache.scatter_(1, torch.ones(4, 1, 16, dtype=torch.long), h[:, None].detach())
        return h * self.cache.select(1, 1)


class Cached(nn.Module):
    """Attention over keys and values of before, at a position that is an input."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(8, 8, bias=False) for _ in range(4))
        self.register_buffer("keys", torch.zeros(2, 4, 6, 2))
        self.register_buffer("values", torch.zeros(2, 4, 6, 2))

    def forward(self, x: Tensor, at: Tensor) -> Tensor:
        q, k, v = (one(x).view(2, -1, 4, 2).transpose(1, 2) for one in (self.q, self.k, self.v))
        self.keys.index_copy_(2, at, k.detach())
        self.values[:, :, at] = v.detach()
        seen = torch.arange(6) <= at[:, None]
        out = F.scaled_dot_product_attention(q, self.keys, self.values, seen)
        return self.o(out.transpose(1, 2).reshape(2, -1, 8))


class Constants(Mlp):
    """Tensors that are made on the way, and one that was there before."""

    table = torch.arange(16.0) / 16

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x) * self.table.to(x.dtype) + torch.tensor([0.5, 2.0] * 8, dtype=x.dtype)
        h = h + torch.linspace(0, 1, 16, dtype=x.dtype) + torch.eye(4, 16, dtype=x.dtype)
        return self.down(h) * torch.tensor(3)


class Detached(Mlp):
    """A part that does not train, in the middle of one that does."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        with torch.no_grad():
            scale = h.abs().amax(-1, keepdim=True) + 1
        return self.down(h / scale + h.detach().sum(-1, keepdim=True))


class StraightThrough(Mlp):
    """Rounded values, with the gradient of those that were not."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        return self.down(h + (h.round() - h).detach())


class Frozen(Mlp):
    """One layer does not train."""

    def __init__(self) -> None:
        super().__init__()
        self.up.requires_grad_(requires_grad=False)


class InReducedPrecision(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            h = F.silu(self.up(x))
        return self.down(h.to(x.dtype))


class Branching(nn.Module):
    """A branch that depends on data."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = Mlp()

    def forward(self, x: Tensor) -> Tensor:
        h = self.mlp.up(x)
        h = torch.cond(h.sum() > 0, lambda y: y * 2, lambda y: y - 1, (h,))
        return self.mlp.down(h)


@torch.library.custom_op("shardscope_cases::twice", mutates_args=())
def twice(x: Tensor) -> Tensor:
    return x * 2


@twice.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


twice.register_autograd(lambda ctx, gradient: gradient * 2)


class Custom(Mlp):
    """An op that nobody knows."""

    def forward(self, x: Tensor) -> Tensor:
        return self.down(twice(self.up(x)))


class InPlace(Mlp):
    """Everything is written over."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        h.mul_(2).add_(x.sum())
        h[:, 3:9] += 1
        h[0].mul_(0.5)
        out = self.down(h)
        out += x
        return out


class ChangesItsInput(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        y = self.down(self.up(x).relu())
        x.add_(y.detach())
        return y


class Normalised(nn.Module):
    """torch's own reparametrisation."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.utils.parametrizations.weight_norm(nn.Linear(8, 16))
        self.down = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu())


class Merged(nn.Module):
    """A low-rank change beside a frozen weight."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16).requires_grad_(requires_grad=False)
        self.a = nn.Parameter(torch.randn(2, 8))
        self.b = nn.Parameter(torch.randn(16, 2))
        self.down = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x) + x @ self.a.T @ self.b.T))


class Checkpointed(nn.Module):
    """What is computed again in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = Mlp()

    def forward(self, x: Tensor) -> Tensor:
        from torch.utils.checkpoint import checkpoint

        out: Tensor = checkpoint(self.mlp, x, use_reentrant=False)
        return out + x


class Stochastic(Mlp):
    """Dropout of what is whole, and of what is cut."""

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.down(F.dropout(self.up(x), 0.3)), 0.3)


def state_cases() -> Iterator[Case]:
    give = lambda: (drawn(4, 8),)  # noqa: E731
    cache = lambda: torch.randn(4, 5, 16)  # noqa: E731
    buffers: dict[str, Any] = {
        "that is read": lambda: Scaled(scale=torch.randn(16), own_shift=torch.randn(16)),
        "that counts": lambda: Counting(count=torch.zeros((), dtype=torch.long)),
        "of running means": lambda: Averaging(mean=torch.zeros(16)),
        "that is not saved": lambda: AveragingWhole(own_last=torch.randn(16)),
        "written by slice": lambda: Remembering(cache=cache()),
        "written by index": lambda: RememberingByIndex(cache=cache()),
        "written by scatter": lambda: RememberingByScatter(cache=cache()),
    }
    for name, make in buffers.items():
        yield Case(f"buffer {name}", make, give, PAIR)
    cut = {
        "scale": ("that is read", Shard(0)),
        "mean": ("of running means", Shard(0)),
        "own_last": ("that is not saved", Shard(0)),
        "cache": ("written by slice", Shard(2)),
    }
    for buffer, (name, style) in cut.items():
        yield Case(f"buffer {name}, cut", buffers[name], give, {**PAIR, buffer: style})
    for name in ("written by index", "written by scatter"):
        yield Case(f"buffer {name}, cut", buffers[name], give, {**PAIR, "cache": Shard(2)})
        yield Case(
            f"buffer {name}, cut where it is written",
            buffers[name],
            give,
            {**PAIR, "cache": Shard(1)},
        )
    heads = {"q": Colwise(), "k": Colwise(), "v": Colwise(), "o": Rowwise()}
    step = lambda: (drawn(2, 2, 8), torch.tensor([2, 3]))  # noqa: E731
    yield Case("cache of keys and values", Cached, step, heads)
    held = {"keys": Shard(1), "values": Shard(1)}
    yield Case(
        "cache of keys and values, cut by head",
        Cached,
        step,
        {**heads, **held},
        counts={"all_reduce": 1},
    )
    yield Case("constants", Constants, give, PAIR)
    yield Case("constants on three", Constants, give, PAIR, mesh="tp=3")
    yield Case("a part that is detached", Detached, give, PAIR)
    yield Case("rounded, straight through", StraightThrough, give, PAIR)
    yield Case("a frozen layer", Frozen, give, PAIR)
    yield Case("autocast", InReducedPrecision, give, PAIR, tolerance=5e-2, dtype=torch.float32)
    yield Case("a branch", Branching, give, {f"mlp.{k}": v for k, v in PAIR.items()}, trains=False)
    yield Case("an op that nobody knows", Custom, give, PAIR)
    yield Case("all in place", InPlace, give, PAIR)
    yield Case("an input that is written to", ChangesItsInput, give, PAIR, trains=False)
    yield Case(
        "weights that are normalised",
        Normalised,
        give,
        {"up.bias": Shard(0), "up.parametrizations.weight.original1": Shard(0), "down": Rowwise()},
    )
    yield Case(
        "weights of low rank", Merged, give, {**PAIR, "b": Shard(0)}, counts={"all_reduce": 1}
    )
    yield Case("computed again", Checkpointed, give, {f"mlp.{k}": v for k, v in PAIR.items()})
    yield Case("dropout", Stochastic, give, PAIR, is_random=True)
    yield Case(
        "dropout on a 2-d mesh",
        Stochastic,
        give,
        PAIR,
        mesh="dp=2,tp=2",
        inputs={"x": {"dp": Shard(0)}},
        is_random=True,
    )
    text = lambda: (tokens(2, 5),)  # noqa: E731
    yield Case("what is not zero", Nonzero, text, {"embed": Colwise()}, trains=False)


class Nonzero(nn.Module):
    """As many rows as the data say."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 8)

    def forward(self, ids: Tensor) -> Tensor:
        return self.embed(ids.flatten()[(ids.flatten() > 3).nonzero().squeeze(1)]).sum(0)
