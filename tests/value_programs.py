"""Training runs in several layouts, with and without mistakes, whose values are sampled.

`python value_programs.py FOLDER NAME...` runs them as one rank of a real gloo group and saves what
each recorded as FOLDER/NAME-RANK.json.gz. A name is a layout and mistakes: `ddp`, `tp lr`.
"""

from __future__ import annotations

import os
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from shardscope import Trace, trace

WIDTH = 16
NUM_STEPS = 4
BATCH = 8


class Block(nn.Module):
    """A residual MLP with a norm and a buffer that scales what is added."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)
        self.scale = Scale()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Keep what comes in, and add to it."""
        return x + self.scale(self.down(self.up(self.norm(x)).relu()))


class Scale(nn.Module):
    """Multiplies by a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("factor", torch.full((WIDTH,), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scale."""
        return x * self.factor.to(x.dtype)


class Model(nn.Module):
    """Tokens, two blocks and logits."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(WIDTH, 32)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits of tokens."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class LocalRows(nn.Module):
    """A row-wise linear layer by hand, which returns a partial sum: its all-reduce is missing."""

    def __init__(self, layer: nn.Linear, mesh: DeviceMesh) -> None:
        super().__init__()
        rank = mesh.get_local_rank()
        shard = layer.weight.detach().chunk(mesh.size(), dim=1)[rank]
        self.weight = nn.Parameter(shard.clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """What this rank's columns add."""
        return nn.functional.linear(x, self.weight)


def parallelize(model: Model, layout: str, mistakes: list[str]) -> nn.Module:
    """Apply a layout to a model on the ranks of this world."""
    size = dist.get_world_size()
    if layout == "ddp":
        return DistributedDataParallel(model)
    if layout.startswith("fsdp") or layout == "hsdp":
        shape = (2, size // 2) if layout == "hsdp" else (size,)
        names = ("replica", "shard") if layout == "hsdp" else ("dp",)
        policy = MixedPrecisionPolicy()
        if layout == "fsdp_bf16":
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        for block in model.blocks:
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
    if layout in ("tp", "tp_bf16"):
        mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))
        for block in model.blocks:
            is_last = block is model.blocks[1]
            plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            if is_last and "reduction" in mistakes:
                del plan["down"]
            parallelize_module(block, mesh, plan)
            if is_last and "reduction" in mistakes:
                block.down = LocalRows(block.down, mesh)
    return model


def train(layout: str, *mistakes: str) -> Trace:
    """Four steps of training with AdamW and clipping, on this rank's part of the batch."""
    torch.manual_seed(0)
    model: Any = Model()
    if layout.endswith("_bf16") and not layout.startswith("fsdp"):
        model = model.bfloat16()
    is_data_parallel = layout.startswith(("ddp", "fsdp", "hsdp"))
    rank, size = (dist.get_rank(), dist.get_world_size()) if is_data_parallel else (0, 1)
    wrapped = (
        parallelize(model, layout, list(mistakes)) if layout.partition("_")[0] != "one" else model
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(2 if "seed" in mistakes else 1)
    with trace(wrapped, values=True) as t:
        for step in range(1, NUM_STEPS + 1):
            if step == 3 and "lr" in mistakes:
                optimizer.param_groups[0]["lr"] = 2e-3
            if step == 2 and "buffer" in mistakes and dist.get_rank() == 1:
                model.blocks[1].scale.factor[3] = 0.75
            tokens = torch.randint(0, 32, (BATCH, 9), generator=generator)
            batch = tokens.chunk(size)[rank]
            optimizer.zero_grad()
            num_parts = 2 if "accumulate" in mistakes else 1
            is_lost = "unsynchronized" in mistakes and step == 3
            for part in batch.chunk(num_parts):
                with wrapped.no_sync() if is_lost else nullcontext():
                    logits = wrapped(part[:, :-1]).float()
                    loss = nn.functional.cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten())
                    (loss / num_parts).backward()
            if "scaled" in mistakes and step == 2:
                for parameter in model.parameters():
                    parameter.grad.mul_(2.0)
            if not layout.startswith("tp") and "unclipped" not in mistakes:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    return t


def main(folder: str, *names: str) -> None:
    """Run the programs of these names on this rank."""
    dist.init_process_group("gloo")
    for name in names:
        recorded = train(*name.split())
        rank = os.environ["RANK"]
        recorded.save(Path(folder) / f"{name.replace(' ', '-')}-{rank}.json.gz")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
