"""The programs that `parallel.py` times: as models, and written by hand for one rank.

By hand means as Megatron-LM does it: local weights, plain functions, and an autograd function on
each side of a pair of layers whose collectives are the ones that the transformed program has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel
from torch.nn import functional

from shardscope.parallel import Colwise, Rowwise

__all__ = ["DTENSOR_PLANS", "MODELS", "PLANS", "ByHand", "loss"]

NUM_HEADS = 8


class Mlp(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.up = nn.Linear(dim, 4 * dim)
        self.down = nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(functional.gelu(self.up(x)))
        return out


class Attention(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.head_dim = dim // NUM_HEADS
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        mixed = functional.scaled_dot_product_attention(
            self._heads(self.q(x)), self._heads(self.k(x)), self._heads(self.v(x)), is_causal=True
        )
        out: Tensor = self.o(mixed.transpose(1, 2).flatten(2))
        return out

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(2, (-1, self.head_dim)).transpose(1, 2)


class Block(nn.Module):
    """Attention and an MLP, each after a norm and beside a residual."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(dim), Attention(dim)
        self.norm2, self.mlp = nn.LayerNorm(dim), Mlp(dim)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


MODELS: dict[str, Callable[[int], nn.Module]] = {"MLP": Mlp, "block": Block}
_MLP = {"up": Colwise(), "down": Rowwise()}
_BLOCK = {
    "attention.[qkv]": Colwise(),
    "attention.o": Rowwise(),
    "mlp.up": Colwise(),
    "mlp.down": Rowwise(),
}
PLANS: dict[str, dict[str, Any]] = {"MLP": _MLP, "block": _BLOCK}


def _as_torch_has_it(plan: Mapping[str, Any]) -> dict[str, ParallelStyle]:
    return {
        name: ColwiseParallel() if isinstance(style, Colwise) else RowwiseParallel()
        for name, style in plan.items()
    }


DTENSOR_PLANS = {name: _as_torch_has_it(plan) for name, plan in PLANS.items()}


def loss(output: Tensor, target: Tensor) -> Tensor:
    return functional.mse_loss(output, target)


# ── By hand ──────────────────────────────────────────────────────────────────────────────────


def reduce(x: Tensor, group: str) -> Tensor:
    """The collective of the transformed program, called as it calls it."""
    op = torch.ops._c10d_functional
    summed: Tensor = op.wait_tensor.default(op.all_reduce.default(x, "sum", group))
    return summed


class Enter(torch.autograd.Function):
    """Nothing forwards; backwards the sum over the ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return reduce(gradient, ctx.group), None


class Leave(torch.autograd.Function):
    """Forwards the sum over the ranks; nothing backwards."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str) -> Tensor:
        return reduce(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, None


class ByHand(nn.Module):
    """One rank's program with its weights, which are given by the model's names.

    A module as the others are, and only one: its layers are plain functions.
    """

    def __init__(
        self, name: str, state: Mapping[str, Tensor], *, dim: int, group: str, trains: bool
    ) -> None:
        super().__init__()
        self.weights = {key: nn.Parameter(one.detach().clone()) for key, one in state.items()}
        self._dim, self._head_dim, self._group = dim, dim // NUM_HEADS, group
        self._enter: Callable[..., Tensor] = Enter.apply if trains else lambda x, group: x
        self._leave: Callable[..., Tensor] = Leave.apply if trains else reduce
        self._is_block = name == "block"

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x) if self._is_block else self.mlp(x)

    def mlp(self, x: Tensor, prefix: str = "") -> Tensor:
        w, x = self.weights, self._enter(x, self._group)
        up = functional.linear(x, w[f"{prefix}up.weight"], w[f"{prefix}up.bias"])
        down = functional.linear(functional.gelu(up), w[f"{prefix}down.weight"])
        return self._leave(down, self._group) + w[f"{prefix}down.bias"]

    def attention(self, x: Tensor) -> Tensor:
        w, x = self.weights, self._enter(x, self._group)
        size, length, _ = x.shape
        query, key, value = (
            functional.linear(x, w[f"attention.{one}.weight"], w[f"attention.{one}.bias"])
            .view(size, length, -1, self._head_dim)
            .transpose(1, 2)
            for one in "qkv"
        )
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        together = mixed.transpose(1, 2).reshape(size, length, -1)
        out = functional.linear(together, w["attention.o.weight"])
        return self._leave(out, self._group) + w["attention.o.bias"]

    def block(self, x: Tensor) -> Tensor:
        w, shape = self.weights, (self._dim,)
        x = x + self.attention(functional.layer_norm(x, shape, w["norm1.weight"], w["norm1.bias"]))
        normed = functional.layer_norm(x, shape, w["norm2.weight"], w["norm2.bias"])
        return x + self.mlp(normed, "mlp.")
