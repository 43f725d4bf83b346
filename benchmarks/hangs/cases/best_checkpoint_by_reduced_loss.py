#!/usr/bin/env python3
"""Pre-train with FSDP and save the model whenever the validation loss is the best so far."""

import os
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard

CORRECTED = os.environ.get("HANG") == "corrected"


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.linear = nn.Linear(dim, dim)

    def forward(self, x):
        return x + torch.relu(self.linear(x))


def setup():
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        return torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    return torch.device("cpu")


def train(model, optimizer, generator, device):
    for _ in range(2):
        x = torch.randn(8, 12, generator=generator).to(device)
        loss = (model(x) - x.flip(-1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@torch.no_grad()
def validate(model, epoch, device):
    """The validation loss, summed over the ranks' parts of the validation set."""
    generator = torch.Generator().manual_seed(7 * epoch + dist.get_rank())
    x = torch.randn(8, 12, generator=generator).to(device)
    # Each epoch is validated on another part, some of which are harder than others.
    scale = 1.0 + (epoch + dist.get_rank()) % 2
    loss = (model(scale * x) - scale * x.flip(-1)).square().mean()
    if CORRECTED:
        dist.all_reduce(loss, op=dist.ReduceOp.SUM)
    else:
        dist.reduce(loss, dst=0, op=dist.ReduceOp.SUM)  # HANG
    return loss.item() / dist.get_world_size()


def save(model, path):
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = get_model_state_dict(model, options=options)
    if dist.get_rank() == 0:
        torch.save(state, path)


device = setup()
torch.manual_seed(0)
model = nn.Sequential(*(Block(12) for _ in range(3))).to(device)
for block in model:
    fully_shard(block)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
generator = torch.Generator().manual_seed(100 + dist.get_rank())
best = float("inf")
with tempfile.TemporaryDirectory() as folder:
    for epoch in range(4):
        train(model, optimizer, generator, device)
        loss = validate(model, epoch, device)
        if loss < best:  # HANG
            print(f"rank {dist.get_rank()}: epoch {epoch} has the best loss, {loss:.4f}")
            best = loss
            save(model, os.path.join(folder, "best.pt"))
dist.destroy_process_group()
