"""What the scripts share: the process group, the device, and small models."""

import itertools
import os

import torch
import torch.distributed as dist
from torch import nn


def setup():
    """Initialize the default group as torchrun asks for; returns rank, world size and device."""
    is_cuda = torch.cuda.is_available()
    device = torch.device("cpu")
    if is_cuda:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        dist.init_process_group("nccl" if is_cuda else "gloo")
    torch.manual_seed(0)
    return dist.get_rank(), dist.get_world_size(), device


def finish(message):
    """Print on rank 0 and leave."""
    if dist.get_rank() == 0:
        print(message, flush=True)
    dist.destroy_process_group()


def mlp(*sizes):
    """A multi-layer perceptron with GELU."""
    layers = []
    for first, second in itertools.pairwise(sizes):
        layers += [nn.Linear(first, second), nn.GELU()]
    return nn.Sequential(*layers[:-1])


def batches(num, rank, size=8, dim=6):
    """Batches of a rank, with targets."""
    generator = torch.Generator().manual_seed(100 + rank)
    for _ in range(num):
        x = torch.randn(size, dim, generator=generator)
        yield x, x.sum(-1, keepdim=True)


def any_rank(flag, device):
    """Whether the flag is set on any rank."""
    value = torch.tensor(int(flag), device=device)
    dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return bool(value)


class Block(nn.Module):
    """A residual layer of a transformer-like model."""

    def __init__(self, dim=16):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up, self.down = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class TinyLM(nn.Module):
    """Embedding, blocks and head."""

    def __init__(self, vocab=32, dim=16, num_layers=2):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList(Block(dim) for _ in range(num_layers))
        self.head = nn.Linear(dim, vocab)

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def lm_loss(model, ids):
    """The mean cross-entropy of the next token."""
    logits = model(ids[:, :-1])
    return nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def token_batches(num, rank, size=2, length=10, vocab=32):
    """Batches of token ids of a rank."""
    generator = torch.Generator().manual_seed(200 + rank)
    for _ in range(num):
        yield torch.randint(vocab, (size, length), generator=generator)
