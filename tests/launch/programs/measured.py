"""Trains with FSDP2, and logs times and memory by torch.cuda."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
model = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(4))).cuda()
for layer in model:
    fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters())
start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
for _ in range(2):
    torch.cuda.reset_peak_memory_stats()
    start.record()
    model(torch.randn(512, 2048, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    end.record()
    torch.cuda.synchronize()
    milliseconds = start.elapsed_time(end)
    print(f"PEAK {torch.cuda.max_memory_allocated()} after {milliseconds:.1f} ms", flush=True)
dist.destroy_process_group()
