"""Context parallelism by hand: each rank has a part of every sequence, and gathers keys and values.

With `summed`, gradients are summed over ranks instead of averaged; with `masked`, the model gets a
mask that fits only the keys of all ranks.
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)


class Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx, part):
        parts = [torch.empty_like(part) for _ in range(size)]
        dist.all_gather(parts, part)
        return torch.cat(parts, 1)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(gradient)
        return gradient.chunk(size, 1)[rank].contiguous()


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.qkv = nn.Linear(16, 48)
        self.head = nn.Linear(16, 32)

    def forward(self, tokens, positions, mask=None):
        x = self.embed(tokens) + torch.sin(positions[:, None] * torch.arange(16) / 7)
        query, key, value = self.qkv(x).chunk(3, -1)
        key, value = Gathered.apply(key.contiguous()), Gathered.apply(value.contiguous())
        if mask is None:
            mask = positions[:, None] >= torch.arange(key.shape[1])[None]
        return self.head(functional.scaled_dot_product_attention(query, key, value, mask))


model = Attention()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
generator = torch.Generator().manual_seed(5)
for _ in range(3):
    tokens = torch.randint(32, (4, 8), generator=generator)
    full = tokens, tokens.flip(1), torch.arange(8)
    tokens, labels, positions = (tensor.chunk(size, -1)[rank] for tensor in full)
    mask = positions[:, None] >= torch.arange(8) if "masked" in sys.argv else None
    logits = model(tokens, positions, mask)
    functional.cross_entropy(logits.flatten(0, 1), labels.flatten()).backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        if "summed" not in sys.argv:
            parameter.grad /= size
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
