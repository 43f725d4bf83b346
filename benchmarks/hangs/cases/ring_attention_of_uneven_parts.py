"""Long-context evaluation with ring attention: keys and values travel around the ring."""

import math
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset

CORRECTED = os.environ.get("HANG") == "corrected"


def split_sequence(tokens, rank, world_size, pad_id=0):
    """This rank's part; the last one is shorter if the ranks do not divide the length."""
    if CORRECTED:
        tokens = nn.functional.pad(tokens, (0, -tokens.shape[1] % world_size), value=pad_id)
    return tokens.tensor_split(world_size, 1)[rank]  # HANG


def ring_pass(tensor):
    """Send to the next rank, receive from the one before."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    received = torch.empty_like(tensor)
    ops = [
        dist.P2POp(dist.isend, tensor.contiguous(), (rank + 1) % world_size),
        dist.P2POp(dist.irecv, received, (rank - 1) % world_size),
    ]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return received


def ring_attention(q, k, v):
    """Attention of the local queries to all keys, with an online softmax."""
    total = torch.zeros_like(q)
    denominator = q.new_zeros(*q.shape[:-1], 1)
    maximum = q.new_full((*q.shape[:-1], 1), -torch.inf)
    for step in range(dist.get_world_size()):
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        largest = torch.maximum(maximum, scores.amax(-1, keepdim=True))
        weights, scale = torch.exp(scores - largest), torch.exp(maximum - largest)
        total = total * scale + weights @ v
        denominator = denominator * scale + weights.sum(-1, keepdim=True)
        maximum = largest
        if step < dist.get_world_size() - 1:
            k, v = ring_pass(torch.stack([k, v])).unbind(0)
    return total / denominator


class Layer(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x):
        return x + self.out(ring_attention(*self.qkv(x).chunk(3, -1)))


class Documents(Dataset):
    """Documents, which all ranks read in the same order."""

    length = int(os.environ.get("DOCUMENT_LENGTH", "24"))

    def __len__(self):
        return 2

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        return torch.randint(1, 50, (self.length,), generator=generator)


@torch.no_grad()
def main():
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.manual_seed(0)
    embed = nn.Embedding(50, 16).to(device)
    layers = nn.Sequential(Layer(16), Layer(16)).to(device)
    for document, tokens in enumerate(DataLoader(Documents(), batch_size=1)):
        hidden = layers(embed(split_sequence(tokens.to(device), rank, world_size)))
        score = hidden.square().mean()
        dist.all_reduce(score)
        if rank == 0:
            print(f"document {document}: {score.item() / world_size:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
