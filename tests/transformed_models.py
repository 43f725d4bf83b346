"""Models to transform, each with its inputs and plan, the same on real ranks and on none.

`python transformed_models.py` transforms and runs all of them as one rank of a real gloo group, and
prints what came of each as JSON.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.experimental._tp_transform import (
    tensor_parallel_transformation as torchs_transformation,
)
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.export import Dim, ExportedProgram
from torch.nn import functional
from torch.utils._pytree import tree_leaves

from shardscope.compat import tensor_parallel_transformation
from shardscope.parallel import Colwise, Plan

__all__ = [
    "CASES",
    "Case",
    "MLPs",
    "count_collectives",
    "export",
    "mlp_plan",
]


@dataclass(frozen=True)
class Case:
    """A model with what it is called with, and a plan for it."""

    model: Callable[[], nn.Module]
    inputs: Callable[[], tuple[Any, ...]]
    plan: Any
    does_torchs_work: bool = False  # it takes only programs of core ops
    dynamic: Any = None


class MLPs(nn.Module):
    """Pairs of linear layers, after a split and before a constant."""

    def __init__(self, num_pairs: int, *, bias: bool = True) -> None:
        super().__init__()
        self.pairs = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 18), nn.ReLU(), nn.Linear(18, 6, bias=bias))
            for _ in range(num_pairs)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = torch.chunk(x, 2, dim=1)[0]
        for pair in self.pairs:
            x = pair(x)
        return x + torch.ones_like(x)


def mlp_plan(num_pairs: int) -> dict[str, Any]:
    return {
        f"pairs.{i}.{layer}": style
        for i in range(num_pairs)
        for layer, style in ((0, ColwiseParallel), (2, RowwiseParallel))
    }


class Hidden(nn.Module):
    """Something between a column-wise and a row-wise layer, or after the first one alone."""

    def __init__(self, between: Any, *, width: int = 8, has_second: bool = True) -> None:
        super().__init__()
        self.up = nn.Linear(4, 8)
        self.between = between
        self.down = nn.Linear(width, 4) if has_second else nn.Identity()

    def forward(self, x: Tensor) -> Any:
        return self.down(self.between(self.up(x)))


class Squared(nn.Module):
    """What leaves a row-wise layer is used twice by one op."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(self.up(x))
        return torch.cat([y, y]) * torch.cat([y * y, y])


PAIR: dict[str, Any] = {"up": ColwiseParallel, "down": RowwiseParallel}
UP: dict[str, Any] = {"up": ColwiseParallel}


class Buffers(nn.Module):
    """Buffers that are saved, written to, and not saved; a constant that export lifts."""

    scale: Tensor
    calls: Tensor
    shift: Tensor

    def __init__(self, *, is_persistent: bool = True) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)
        self.register_buffer("scale", torch.rand(8))
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("shift", torch.rand(4), persistent=is_persistent)

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        constant = torch.tensor([1.0, 2.0, 3.0, 4.0])
        return self.down(self.up(x) * self.scale) + self.shift * constant * self.calls


class Attention(nn.Module):
    """Self-attention of four heads, with views of sizes that export bakes in."""

    def __init__(self, *, is_fused: bool) -> None:
        super().__init__()
        self.wq, self.wk, self.wv = (nn.Linear(16, 16) for _ in range(3))
        self.wo = nn.Linear(16, 16)
        self.is_fused = is_fused

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        shape = (batch, length, 4, 4)
        q, k, v = (one(x).view(shape).transpose(1, 2) for one in (self.wq, self.wk, self.wv))
        if self.is_fused:
            mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            mixed = (q @ k.transpose(-2, -1) / 2).softmax(-1) @ v
        return x + self.wo(mixed.transpose(1, 2).reshape(batch, length, width))


class Norm(nn.Module):
    """RMSNorm with the casts of Llama's."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(16))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).type_as(
            x
        ) * self.weight


class Tied(nn.Module):
    """An embedding, an attention, and a head that is the embedding."""

    def __init__(self, *, is_tied: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 16)
        self.norm = Norm()
        self.attention = Attention(is_fused=True)
        self.head = nn.Linear(16, 12, bias=False)
        if is_tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> dict[str, Any]:
        hidden = self.attention(self.norm(self.embed(tokens)))
        return {"hidden": hidden, "logits": [self.head(hidden)]}


TIED: dict[str, Any] = {
    "embed": RowwiseParallel(input_layouts=Replicate()),
    "attention.w[qkv]": ColwiseParallel,
    "attention.wo": RowwiseParallel,
    "head": ColwiseParallel(output_layouts=Replicate()),
}
ATTENTION: dict[str, Any] = {
    **dict.fromkeys(("wq", "wk", "wv"), ColwiseParallel),
    "wo": RowwiseParallel,
}


class Optional(nn.Module):
    """Takes a tensor or None, and a number."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor, mask: Tensor | None, scale: float) -> Tensor:
        hidden = self.up(x) * scale
        return self.down(hidden if mask is None else hidden * mask)


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.second = nn.Conv2d(8, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(functional.max_pool2d(self.norm(self.first(x)).relu(), 2)).flatten(1)


def _rows() -> tuple[Tensor]:
    return (torch.randn(6, 4),)


def _hidden(between: Any, **options: Any) -> Callable[[], nn.Module]:
    class Between(nn.Module):
        def forward(self, h: Tensor) -> Any:
            return between(h)

    return lambda: Hidden(Between(), **options)


CASES = {
    # What torch's does rightly, too.
    "pairs": Case(
        lambda: MLPs(2), lambda: (torch.randn(10, 12),), mlp_plan(2), does_torchs_work=True
    ),
    "pair without bias": Case(
        lambda: MLPs(1, bias=False),
        lambda: (torch.randn(10, 12),),
        mlp_plan(1),
        does_torchs_work=True,
    ),
    "buffers": Case(Buffers, _rows, PAIR, does_torchs_work=True),
    "column-wise alone": Case(_hidden(torch.tanh, has_second=False), _rows, UP, True),
    "row-wise alone": Case(_hidden(torch.tanh), _rows, {"down": RowwiseParallel}, True),
    "nothing": Case(_hidden(torch.tanh), _rows, {}, True),
    # Where it fails, or computes something else.
    "batch norm": Case(
        lambda: nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5)),
        lambda: (torch.randn(7, 3),),
        {"0": ColwiseParallel},
    ),
    "style objects": Case(_hidden(functional.gelu), _rows, {n: s() for n, s in PAIR.items()}),
    "patterns": Case(
        lambda: MLPs(2),
        lambda: (torch.randn(10, 12),),
        {"pairs.*.0": "colwise", "**.[0-1].2": "rowwise"},
    ),
    "placements": Case(
        _hidden(functional.gelu), _rows, {"up.*": Shard(0), "down.weight": Shard(1)}
    ),
    "a plan": Case(_hidden(functional.gelu), _rows, Plan(PAIR)),
    "fused attention": Case(
        lambda: Attention(is_fused=True), lambda: (torch.randn(2, 5, 16),), ATTENTION
    ),
    "attention by hand": Case(
        lambda: Attention(is_fused=False), lambda: (torch.randn(2, 5, 16),), ATTENTION
    ),
    "untied": Case(lambda: Tied(is_tied=False), lambda: (torch.randint(12, (2, 5)),), TIED),
    "tied": Case(Tied, lambda: (torch.randint(12, (2, 5)),), TIED),
    "convolutions": Case(
        ConvNet, lambda: (torch.randn(2, 3, 8, 8),), {"first": Colwise(), "second": "rowwise"}
    ),
    "softmax of rows and columns": Case(
        _hidden(lambda h: h.softmax(0) + h.softmax(1)), _rows, PAIR
    ),
    "itself twice": Case(_hidden(lambda h: h * h), _rows, PAIR),
    "a sum of addends twice": Case(Squared, _rows, PAIR),
    "joined with itself": Case(_hidden(lambda h: torch.cat([h, h]).mean(0)), _rows, PAIR),
    "joined where it is cut": Case(_hidden(lambda h: torch.cat([h, h], 1), width=16), _rows, PAIR),
    "cumulative sum from the back": Case(_hidden(lambda h: h.cumsum(-1)), _rows, PAIR),
    "sum of what is cut": Case(_hidden(lambda h: h.sum(), has_second=False), _rows, UP),
    "several results": Case(
        _hidden(lambda h: (h.max(-1), [h.chunk(2, -1)], None), has_second=False), _rows, UP
    ),
    "open batch": Case(
        lambda: Attention(is_fused=True),
        lambda: (torch.randn(3, 5, 16),),
        ATTENTION,
        dynamic=({0: Dim("batch")},),
    ),
    "no mask": Case(Optional, lambda: (torch.randn(6, 4), None, 0.5), PAIR),
    "buffers that are not saved": Case(lambda: Buffers(is_persistent=False), _rows, PAIR),
}


def export(case: Case) -> tuple[ExportedProgram, tuple[Any, ...]]:
    """The case's program, the same on every rank, and its inputs."""
    model, inputs = _make(case), case.inputs()
    program = torch.export.export(model, inputs, dynamic_shapes=case.dynamic)
    return (program.run_decompositions(_table()) if case.does_torchs_work else program), inputs


def _make(case: Case) -> nn.Module:
    torch.manual_seed(0)
    return case.model()


@cache
def _table() -> Any:
    """Torch's decompositions, which it takes half a second to list."""
    return dict(torch.export.default_decompositions().items())


def count_collectives(program: ExportedProgram) -> dict[str, int]:
    """By name, how many of them and of their waits are in the graph."""
    names = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    prefix = "_c10d_functional."
    found = [name.removeprefix(prefix) for name in names if name.startswith(prefix)]
    return dict(Counter(name.removesuffix(".default") for name in found))


def run_case(
    case: Case, program: ExportedProgram, inputs: tuple[Any, ...], transform: Any
) -> dict[str, Any]:
    """How far this rank's results and buffers are from the single device's, and what it has."""
    rank, size = dist.get_rank(), dist.get_world_size()
    with torch.no_grad():
        mine = transform(program, rank, size, "cpu", case.plan)
        module = mine.module()
        found = tree_leaves(module(*inputs))
        whole = _make(case)
        expected = tree_leaves(whole(*inputs))
    pairs = list(zip(found, expected, strict=True))
    own = dict(module.named_buffers())
    pairs += [(own[name], one) for name, one in whole.named_buffers() if name in own]
    return {
        "error": max(_distance(*pair) for pair in pairs),
        "collectives": count_collectives(mine),
        "shapes": {name: list(one.shape) for name, one in mine.state_dict.items()},
    }


def _distance(one: Any, other: Any) -> float:
    if not isinstance(other, Tensor):
        return 0.0 if one == other else float("inf")
    if one.shape != other.shape or one.dtype != other.dtype:
        return float("inf")
    return float((one.double() - other.double()).abs().max())


def run_all() -> dict[str, Any]:
    results: dict[str, Any] = {}
    for name, case in CASES.items():
        program, inputs = export(case)
        results[name] = run_case(case, program, inputs, tensor_parallel_transformation)
        if case.does_torchs_work:
            # It confuses calls that its cache finds alike, also of earlier programs.
            DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache.cache_clear()
            results[f"{name}, torch's"] = run_case(case, program, inputs, torchs_transformation)
    return results


def main() -> None:
    """Run as one rank, with the variables of a launcher set."""
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    print(json.dumps(run_all()))
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # torch's gloo now and then aborts a process as it ends, without us too


if __name__ == "__main__":
    main()
