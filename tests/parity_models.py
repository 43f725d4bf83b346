"""Small models, ways to make them parallel that are right, and ways that are wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

__all__ = [
    "MLP",
    "Block",
    "Column",
    "Copy",
    "Gated",
    "Gather",
    "GatherAndReduce",
    "LanguageModel",
    "Row",
    "Scatter",
    "Sum",
    "SumBoth",
    "by_hand",
    "data_parallel",
    "fail_on_one",
    "make_tokens",
    "reduce_gradients",
    "sequence_parallel",
    "squared",
    "tensor_and_data_parallel",
    "tensor_parallel",
]


class MLP(nn.Module):
    def __init__(self, size: int = 8, hidden: int = 16) -> None:
        super().__init__()
        self.up = nn.Linear(size, hidden)
        self.down = nn.Linear(hidden, size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(nn.functional.gelu(self.up(x)))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        q, k, v = (
            one(x).view(batch, length, -1, 2).transpose(1, 2) for one in (self.wq, self.wk, self.wv)
        )
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(y.transpose(1, 2).reshape(batch, length, -1))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(8), Attention()
        self.norm2, self.mlp = nn.LayerNorm(8), MLP()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class LanguageModel(nn.Module):
    """With a tied head, and a dict for an output."""

    def __init__(self, num_layers: int = 2) -> None:
        super().__init__()
        self.tok = nn.Embedding(32, 8)
        self.layers = nn.ModuleList(Block() for _ in range(num_layers))
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 32, bias=False)
        self.head.weight = self.tok.weight

    def forward(self, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.tok(tokens)
        for layer in self.layers:
            x = layer(x)
        return {"logits": self.head(self.norm(x))}


def make_tokens() -> torch.Tensor:
    return torch.randint(0, 32, (4, 8), generator=torch.Generator().manual_seed(5))


_STYLES: dict[str, Any] = {
    "attn.wq": ColwiseParallel(),
    "attn.wk": ColwiseParallel(),
    "attn.wv": ColwiseParallel(),
    "attn.wo": RowwiseParallel(),
    "mlp.up": ColwiseParallel(),
    "mlp.down": RowwiseParallel(),
}


def tensor_parallel(model: Any, mesh: DeviceMesh) -> Any:
    for layer in model.layers:
        parallelize_module(layer, mesh["tp"], _STYLES)
    return model


def data_parallel(model: Any, mesh: DeviceMesh) -> Any:
    for layer in model.layers:
        fully_shard(layer, mesh=mesh["dp"])
    return fully_shard(model, mesh=mesh["dp"])


def tensor_and_data_parallel(model: Any, mesh: DeviceMesh) -> Any:
    return data_parallel(tensor_parallel(model, mesh), mesh)


def _gathered() -> PrepareModuleInput:
    return PrepareModuleInput(
        input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),), use_local_output=True
    )


def sequence_parallel(model: Any, mesh: DeviceMesh) -> Any:
    tok = PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Shard(1))
    around = {"tok": tok, "norm": SequenceParallel(), "head": _gathered()}
    parallelize_module(model, mesh["tp"], around)
    styles = {
        **_STYLES,
        "norm1": SequenceParallel(),
        "norm2": SequenceParallel(),
        "attn": _gathered(),
        "mlp": _gathered(),
        "attn.wo": RowwiseParallel(output_layouts=Shard(1)),
        "mlp.down": RowwiseParallel(output_layouts=Shard(1)),
    }
    for layer in model.layers:
        parallelize_module(layer, mesh["tp"], styles)
    return model


class Copy(torch.autograd.Function):
    """Hands a value on as it is, and sums its gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        gradient = gradient.clone()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class Sum(torch.autograd.Function):
    """Sums a value, and hands its gradient on as it is."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient, None


def _all_gather(x: torch.Tensor, group: Any, dim: int) -> torch.Tensor:
    shards = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    dist.all_gather(shards, x.contiguous(), group=group)
    return torch.cat(shards, dim)


def _shard(x: torch.Tensor, group: Any, dim: int) -> torch.Tensor:
    return x.chunk(dist.get_world_size(group), dim)[dist.get_rank(group)].contiguous()


class Scatter(torch.autograd.Function):
    """Takes this rank's shard of a replicated value, and gathers its gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any, dim: int) -> torch.Tensor:
        ctx.group, ctx.dim = group, dim
        return _shard(x, group, dim).clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return _all_gather(gradient, ctx.group, ctx.dim), None, None


class Gather(torch.autograd.Function):
    """Gathers shards, and takes this rank's shard of a replicated gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any, dim: int) -> torch.Tensor:
        ctx.group, ctx.dim = group, dim
        return _all_gather(x, group, dim)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return _shard(gradient, ctx.group, ctx.dim), None, None


class GatherAndReduce(torch.autograd.Function):
    """Gathers shards, and averages the gradient, if over another group, before it is scattered."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any, dim: int, other: Any) -> torch.Tensor:
        ctx.group, ctx.dim = other, dim
        return _all_gather(x, group, dim)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        gradient = gradient.clone()
        dist.all_reduce(gradient, dist.ReduceOp.AVG, ctx.group)
        return _shard(gradient, ctx.group, ctx.dim), None, None, None


def reduce_gradients(module: nn.Module, group: Any, op: Any) -> None:
    """Let every gradient be all-reduced as soon as it is there."""

    def reduce(gradient: torch.Tensor) -> torch.Tensor:
        gradient = gradient.clone()
        dist.all_reduce(gradient, op, group)
        return gradient

    for parameter in module.parameters():
        parameter.register_hook(reduce)


class SumBoth(torch.autograd.Function):
    """Sums a value, and, wrongly, its gradient, as autograd through a collective does."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        gradient = gradient.clone()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class Column(nn.Module):
    """A column-wise layer by hand, of the piece that `index` says."""

    def __init__(self, whole: nn.Linear, mesh: DeviceMesh, *, index: int, copies: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(whole.weight.detach().chunk(mesh.size(), 0)[index].clone())
        self.bias = nn.Parameter(whole.bias.detach().chunk(mesh.size(), 0)[index].clone())
        self.group = mesh.get_group() if copies else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.group is not None:
            x = Copy.apply(x, self.group)
        return nn.functional.linear(x, self.weight, self.bias)


class Row(nn.Module):
    """A row-wise layer by hand; `reduce` sums, or forgets to."""

    def __init__(self, whole: nn.Linear, mesh: DeviceMesh, *, reduce: Any, bias: str) -> None:
        super().__init__()
        index = mesh.get_local_rank()
        self.weight = nn.Parameter(whole.weight.detach().chunk(mesh.size(), 1)[index].clone())
        self.bias = nn.Parameter(whole.bias.detach().clone())
        self.group, self.reduce, self.where = mesh.get_group(), reduce, bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = nn.functional.linear(x, self.weight, self.bias if self.where == "before" else None)
        if self.reduce is not None:
            y = self.reduce.apply(y, self.group)
        return y + self.bias if self.where == "after" else y


def by_hand(
    *,
    reduce: Any = Sum,
    copies: bool = True,
    index: Callable[[DeviceMesh], int] = lambda mesh: mesh.get_local_rank(),
    bias: str = "after",
) -> Callable[[Any, DeviceMesh], Any]:
    """The last block's MLP with layers of our own, right by default."""

    def parallelize(model: Any, mesh: DeviceMesh) -> Any:
        axis = mesh["tp"]
        mlp = model.layers[-1].mlp
        mlp.up = Column(mlp.up, axis, index=index(axis), copies=copies)
        mlp.down = Row(mlp.down, axis, reduce=reduce, bias=bias)
        return model

    return parallelize


class Gated(nn.Module):
    """A pair of layers with a softmax between, and a count of its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 12)
        self.down = nn.Linear(12, 8)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        self.calls += 1
        return {"y": self.down(self.up(x).softmax(-1)), "x": x}


def squared(output: dict[str, Tensor]) -> Tensor:
    return output["y"].pow(2).mean()


def fail_on_one(model: nn.Module, mesh: DeviceMesh) -> None:
    if mesh.get_local_rank() == 1:
        raise ValueError("no weights for this rank")
    dist.barrier()
