"""Small models for trainers, sharded in simulated worlds, and what a step of them says."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.modules.module as module_hooks
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from shardscope import Recording, World
from shardscope._torch.collectives.events import OBSERVERS

__all__ = [
    "Block",
    "Said",
    "is_watched",
    "leaving_torch_alone",
    "make_batches",
    "make_net",
    "said",
    "shard_net",
]

# Of a collective, all but when it was said.
Said = tuple[object, ...]


class Block(nn.Module):
    """Draws random numbers in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.drop = nn.Dropout(0.5)
        self.down = nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.drop(self.up(x)).relu())


def make_net() -> nn.Sequential:
    """The same one each time."""
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block())


def shard_net(net: nn.Sequential, world: World) -> nn.Sequential:
    """Tensor parallel over tp, and FSDP2 over dp."""
    for block in net:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(block, world.mesh["tp"], plan)
        fully_shard(block, mesh=world.mesh["dp"])
    return net


def make_batches(number: int = 12) -> list[torch.Tensor]:
    """The same ones each time."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(8, generator=generator) for _ in range(number)]


def said(recording: Recording, prefix: str = "") -> list[Said]:
    """What was said, in order; `prefix` is taken off the names of modules."""

    def strip(name: str | None) -> str | None:
        return name if name is None else name.removeprefix(prefix).lstrip(".")

    return [
        (one.phase, one.kind, one.group, one.axis, one.input_bytes, strip(one.owner), one.cause)
        for one in recording.collectives
    ]


@contextmanager
def leaving_torch_alone() -> Iterator[None]:
    """Import trainers without what that does: Lightning replaces `torch.compile`, all warn."""
    torchs_own = torch.compile
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            torch.compile = torchs_own


def is_watched() -> bool:
    """Whether any trace is on, or left something behind in torch."""
    return bool(OBSERVERS.current[0]) or bool(module_hooks._global_forward_pre_hooks)
