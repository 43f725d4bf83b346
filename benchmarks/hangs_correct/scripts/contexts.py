"""Context parallelism: parts of a sequence on the ranks, padded to a common length."""

import argparse
import math

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dist_nn
from common import finish, setup
from torch import nn

ALGORITHMS = ["ring", "all-gather", "heads"]
DIM, HEADS = 8, 2


def ring_pass(tensor, rank, size):
    received = torch.empty_like(tensor)
    ops = [
        dist.P2POp(dist.isend, tensor.contiguous(), (rank + 1) % size),
        dist.P2POp(dist.irecv, received, (rank - 1) % size),
    ]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return received


def attend(q, k, v):
    return (q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])).softmax(-1) @ v


def exchange(x, split, joined):
    """An all-to-all that splits one dim and joins another."""
    parts = [part.contiguous() for part in x.chunk(dist.get_world_size(), split)]
    sent = torch.stack(parts)
    received = dist_nn.all_to_all_single(torch.empty_like(sent), sent)
    return torch.cat(received.unbind(0), joined)


class Attention(nn.Module):
    def __init__(self, algorithm):
        super().__init__()
        self.algorithm = algorithm
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        if self.algorithm == "heads":
            q, k, v = (exchange(t, 1, 2) for t in (q, k, v))
            mixed = exchange(attend(q, k, v), 2, 1)
        else:
            mixed = attend(q, *self.all_keys(k, v))
        return x + self.out(mixed.transpose(1, 2).flatten(2))

    def all_keys(self, k, v):
        if self.algorithm == "all-gather":
            return tuple(torch.cat(dist_nn.all_gather(t.contiguous()), 2) for t in (k, v))
        rank, size = dist.get_rank(), dist.get_world_size()
        parts = [torch.stack([k, v])]
        for _ in range(size - 1):
            with torch.no_grad():
                parts.append(ring_pass(parts[-1].detach(), rank, size))
        return torch.cat(parts, 3).unbind(0)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--algorithm", choices=ALGORITHMS, default="ring")
    args = parser.parse_args()
    rank, size, device = setup()
    model = nn.Sequential(nn.Embedding(20, DIM), Attention(args.algorithm), nn.Linear(DIM, 20))
    model = model.to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(0)  # all ranks read the same sequence
    for length in (12, 11, 9):
        tokens = torch.randint(20, (2, length), generator=generator)
        tokens = nn.functional.pad(tokens, (0, -length % size)).chunk(size, 1)[rank].to(device)
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        optimizer.zero_grad()
        loss.backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)
        optimizer.step()
    finish("done")


if __name__ == "__main__":
    main()
