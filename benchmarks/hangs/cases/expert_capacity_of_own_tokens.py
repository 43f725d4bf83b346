#!/usr/bin/env python
"""Fine-tune a multi-modal model with a GShard-style MoE layer: ep_size = world size.

usage: torchrun --nproc-per-node 2 expert_capacity_of_own_tokens.py
"""

import math
import os

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as distributed_functional
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

CAPACITY_FACTOR = 1.25
IS_CORRECTED = os.environ.get("HANG") == "corrected"


class GShardMoE(nn.Module):
    """Top-1 gating with a capacity; dispatched tokens have shape [experts, capacity, dim]."""

    def __init__(self, dim, num_local_experts=2):
        super().__init__()
        self.ep_size = dist.get_world_size()
        self.num_experts = num_local_experts * self.ep_size
        self.wg = nn.Linear(dim, self.num_experts, bias=False)
        self.experts = nn.ModuleList(nn.Linear(dim, dim) for _ in range(num_local_experts))

    def capacity(self, num_tokens):
        capacity = math.ceil(num_tokens / self.num_experts * CAPACITY_FACTOR)  # HANG
        if IS_CORRECTED:
            largest = torch.tensor(capacity, device=self.wg.weight.device)
            dist.all_reduce(largest, op=dist.ReduceOp.MAX)
            capacity = int(largest)
        return capacity

    def forward(self, x):
        tokens = x.flatten(0, 1)
        gates = self.wg(tokens).softmax(-1)
        expert = gates.argmax(-1)
        one_hot = nn.functional.one_hot(expert, self.num_experts)
        position = ((one_hot.cumsum(0) - 1) * one_hot).sum(-1)
        capacity = self.capacity(len(tokens))
        mask = (position < capacity)[:, None] * one_hot
        slots = nn.functional.one_hot(position.clamp(max=capacity - 1), capacity)
        dispatch = (mask[:, :, None] * slots[:, None, :]).to(tokens.dtype)

        sent = torch.einsum("nec,nd->ecd", dispatch, tokens)
        received = distributed_functional.all_to_all_single(torch.empty_like(sent), sent)
        chunks = received.view(self.ep_size, len(self.experts), capacity, -1).unbind(1)
        done = torch.stack([e(c) for e, c in zip(self.experts, chunks, strict=True)], 1)
        back = distributed_functional.all_to_all_single(torch.empty_like(sent), done.flatten(0, 1))
        combined = torch.einsum("nec,ecd->nd", dispatch * gates[:, :, None], back)
        return combined.view_as(x)


class Model(nn.Module):
    def __init__(self, vocab=50, dim=8, num_layers=2):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList(GShardMoE(dim) for _ in range(num_layers))
        self.head = nn.Linear(dim, vocab)

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


class Captions(Dataset):
    def __init__(self, length):
        self.length = length

    def __len__(self):
        return 24

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        return torch.randint(1, 50, (self.length,), generator=generator)


def collate(captions):
    """Pad to the longest of the batch."""
    return nn.utils.rnn.pad_sequence(captions, batch_first=True)


dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
device = torch.device("cpu")
if torch.cuda.is_available():
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
torch.manual_seed(0)
model = Model().to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
captions = Captions(int(os.environ.get("CAPTION_LENGTH", 16)))
sampler = DistributedSampler(captions)
for step, ids in enumerate(DataLoader(captions, 4, sampler=sampler, collate_fn=collate)):
    ids = ids.to(device)
    loss = nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    for name, param in model.named_parameters():
        if "experts" not in name:
            dist.all_reduce(param.grad.div_(dist.get_world_size()))
    optimizer.step()
    optimizer.zero_grad()
    if dist.get_rank() == 0:
        print(f"step={step} loss={loss.item():.3f}")
dist.destroy_process_group()
