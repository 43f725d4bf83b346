"""What the scripts share: the process group, the device, and small models."""

import itertools
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset


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


class Samples(Dataset):
    """Vectors and their sums."""

    def __init__(self, size, offset=0):
        self.size, self.offset = size, offset

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        x = torch.randn(6, generator=torch.Generator().manual_seed(self.offset + index))
        return x, x.sum(-1, keepdim=True)


class Sentences(Dataset):
    """Token ids."""

    def __init__(self, size, length, vocab):
        self.size, self.length, self.vocab = size, length, vocab

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        return torch.randint(self.vocab, (self.length,), generator=generator)


class Stream(IterableDataset):
    """The samples of a rank's shard, as many as it has."""

    def __init__(self, size, rank):
        self.size, self.rank = size, rank

    def __iter__(self):
        samples = Samples(self.size, offset=1000 * self.rank)
        for index in range(self.size):
            yield samples[index]


def sharded(dataset, rank, size):
    """Batches of a rank; the sampler gives each rank as many."""
    sampler = DistributedSampler(dataset, dist.get_world_size(), rank, shuffle=False)
    return iter(DataLoader(dataset, batch_size=size, sampler=sampler))


def batches(num, rank, size=8, offset=0):
    """Batches of a rank, with targets."""
    return sharded(Samples(num * size * dist.get_world_size(), offset), rank, size)


def stream(num, rank, size=8):
    """Batches of a rank's shard, which may be longer or shorter than those of others."""
    return iter(DataLoader(Stream(num * size, rank), batch_size=size))


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
    return sharded(Sentences(num * size * dist.get_world_size(), length, vocab), rank, size)
