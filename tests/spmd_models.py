"""A tensor-parallel block of plain tensors with annotations and collectives of spmd_types."""

from __future__ import annotations

import spmd_types as spmd
import torch
import torch.distributed as dist
from torch import nn

DIM = 4096


class TypedBlock(nn.Module):
    """Gathers its input, multiplies shards, scatters the sum, and scales it by a replicated gain.

    `spare` is annotated as the same on every rank, `free` has no annotation, `seed` varies.
    """

    def __init__(self, tp: dist.ProcessGroup, dp: dist.ProcessGroup, *, dim: int = DIM) -> None:
        super().__init__()
        self.tp = tp
        local = dim // dist.get_world_size(tp)
        self.up = nn.Parameter(torch.ones(dim, local))
        self.down = nn.Parameter(torch.ones(local, dim))
        self.gain = nn.Parameter(torch.ones(dim))
        self.spare = nn.Parameter(torch.ones(dim, dim))
        self.register_buffer("seed", torch.ones(3))
        self.free = nn.Parameter(torch.ones(dim, dim))
        spmd.assert_type(self.up, {dp: spmd.R, tp: spmd.S(1)})
        spmd.assert_type(self.down, {dp: spmd.R, tp: spmd.S(0)})
        for parameter in (self.gain, self.spare):
            spmd.assert_type(parameter, {dp: spmd.R, tp: spmd.I})
        spmd.assert_type(self.seed, {dp: spmd.R, tp: spmd.V})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = spmd.redistribute(x, self.tp, src=spmd.S(0), dst=spmd.R)
        y = spmd.reduce_scatter(x @ self.up @ self.down, self.tp, src=spmd.P, dst=spmd.S(0))
        gain = spmd.convert(self.gain, self.tp, src=spmd.I, dst=spmd.R)
        norm = spmd.all_reduce(y.sum(), self.tp, src=spmd.V, dst=spmd.R)
        return y * gain + norm
