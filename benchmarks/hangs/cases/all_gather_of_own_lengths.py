"""Contrastive learning of sentence pairs, MoCo-style: a queue has the ids of all ranks."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

MAX_LENGTH, PAD, VOCAB = 32, 0, 100


@torch.no_grad()
def concat_all_gather(tensor):
    tensors = [torch.ones_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(tensors, tensor.contiguous())
    return torch.cat(tensors)


class TextEncoder(nn.Module):
    def __init__(self, dim=16):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, dim, padding_idx=PAD)
        self.project = nn.Linear(dim, dim)

    def forward(self, ids):
        return F.normalize(self.project(self.embed(ids).mean(1)), dim=-1)


class Sentences(Dataset):
    """Token ids, padded to MAX_LENGTH, and the number of tokens."""

    num_tokens = int(os.environ.get("SENTENCE_LENGTH", "20"))

    def __len__(self):
        return 24

    def __getitem__(self, index):
        ids = torch.full((MAX_LENGTH,), PAD)
        generator = torch.Generator().manual_seed(index)
        ids[: self.num_tokens] = torch.randint(1, VOCAB, (self.num_tokens,), generator=generator)
        return ids, self.num_tokens


def main():
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank, local_rank = dist.get_rank(), int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.manual_seed(0)
    encoder = TextEncoder().to(device)
    model = DDP(encoder)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    sampler = DistributedSampler(Sentences())
    loader = DataLoader(Sentences(), batch_size=4, sampler=sampler)
    for step, (ids, lengths) in enumerate(loader):
        if os.environ.get("HANG") != "corrected":
            ids = ids[:, : int(lengths.max())]  # HANG
        ids = ids.to(device)
        queue = concat_all_gather(ids)
        queries = model(ids)
        with torch.no_grad():
            keys = encoder(queue.flip(1))
        target = torch.arange(len(ids), device=device) + rank * len(ids)
        loss = F.cross_entropy(queries @ keys.T / 0.1, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0:
            print(f"step {step}: {loss.item():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
