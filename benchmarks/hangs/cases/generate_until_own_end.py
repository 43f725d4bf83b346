"""Rollouts of a sharded student: each rank decodes its prompts, then scores them with a teacher.

torchrun --nproc-per-node 2 generate_until_own_end.py --prompts prompts.txt
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, Dataset, DistributedSampler

parser = argparse.ArgumentParser()
parser.add_argument("--prompts", default=os.environ.get("PROMPTS", "prompts.txt"))
parser.add_argument("--max-length", type=int, default=24)
args = parser.parse_args()
corrected = os.environ.get("HANG") == "corrected"
PAD, VOCAB = 0, 128


class CausalLM(nn.Module):
    def __init__(self, dim, num_layers):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, dim)
        self.layers = nn.ModuleList(nn.GRU(dim, dim, batch_first=True) for _ in range(num_layers))
        self.head = nn.Linear(dim, VOCAB)

    def forward(self, ids):
        hidden = self.embed(ids)
        for layer in self.layers:
            hidden = hidden + layer(hidden)[0]
        return self.head(hidden)


def shard(model):
    for layer in model.layers:
        fully_shard(layer)
    return fully_shard(model)


@torch.no_grad()
def generate(model, ids, max_length):
    """Greedy decoding to a total length of `max_length`, prompt included."""
    is_finished = torch.tensor(ids.shape[1] >= max_length, device=ids.device)
    while True:
        if corrected:
            num_unfinished = 1 - is_finished.int()
            dist.all_reduce(num_unfinished)
            if num_unfinished.item() == 0:
                break
        elif is_finished:  # HANG
            break
        logits = model(ids)
        if not is_finished:
            ids = torch.cat([ids, logits[:, -1:].argmax(-1)], 1)
            is_finished = torch.tensor(ids.shape[1] >= max_length, device=ids.device)
    return ids


class Prompts(Dataset):
    """The lines of a file, as bytes."""

    def __init__(self, path):
        text = Path(path).read_text() if Path(path).exists() else "what is a tensor?\n" * 8
        self.lines = [list(line.encode()) for line in text.splitlines()]

    def __len__(self):
        return len(self.lines)

    def __getitem__(self, index):
        return self.lines[index]


def collate(lines):
    """Pad to the longest of the batch, on the left."""
    longest = max(map(len, lines))
    return torch.tensor([[PAD] * (longest - len(line)) + line for line in lines])


def main():
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank, local_rank = dist.get_rank(), int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)

    torch.manual_seed(0)
    student = shard(CausalLM(16, 2).to(device))
    teacher = shard(CausalLM(24, 3).to(device)).requires_grad_(False)
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-4)
    dataset = Prompts(args.prompts)
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=2, sampler=sampler, collate_fn=collate)
    for step, prompts in enumerate(loader):
        ids = generate(student, prompts.to(device), args.max_length)
        target = teacher(ids).softmax(-1)
        loss = nn.functional.kl_div(student(ids).log_softmax(-1), target, reduction="batchmean")
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            print(f"step {step} loss {loss.item():.4f}")
    dist.destroy_process_group()


main()
