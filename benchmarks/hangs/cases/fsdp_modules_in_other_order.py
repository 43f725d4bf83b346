"""Adapters of two sizes in an order that the task of the batch decides, each an FSDP unit."""

import os
import random

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

CORRECTED = os.environ.get("HANG") == "corrected"
TASK = os.environ.get("TASK", "translate")  # of this rank's part of the data


class Adapter(nn.Module):
    def __init__(self, dim, rank):
        super().__init__()
        self.down, self.up = nn.Linear(dim, rank), nn.Linear(rank, dim)

    def forward(self, x):
        return x + self.up(torch.tanh(self.down(x)))


class TaskModel(nn.Module):
    """Language adapter first for translation, task adapter first for anything else."""

    def __init__(self, dim=20):
        super().__init__()
        self.embed = nn.Embedding(50, dim)
        self.language = FSDP(Adapter(dim, 4), device_id=DEVICE)
        self.task = FSDP(Adapter(dim, 12), device_id=DEVICE)
        self.head = nn.Linear(dim, 50)

    def forward(self, tokens, task):
        x = self.embed(tokens)
        if CORRECTED or task == "translate":  # HANG
            x = self.task(self.language(x))
        else:
            x = self.language(self.task(x))
        return self.head(x)


dist.init_process_group(backend="nccl" if torch.cuda.is_available() else "gloo")
LOCAL_RANK = int(os.environ["LOCAL_RANK"])
DEVICE = torch.device("cuda", LOCAL_RANK) if torch.cuda.is_available() else torch.device("cpu")
if torch.cuda.is_available():
    torch.cuda.set_device(LOCAL_RANK)


class Corpus(Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, index):
        rng = random.Random(index)
        return {"tokens": torch.tensor([rng.randrange(50) for _ in range(9)]), "task": TASK}


def train():
    torch.manual_seed(0)
    model = FSDP(TaskModel().to(DEVICE), device_id=DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(Corpus(), batch_size=4, sampler=DistributedSampler(Corpus()))
    for step, batch in enumerate(loader):
        tokens, task = batch["tokens"].to(DEVICE), batch["task"][0]
        logits = model(tokens[:, :-1], task)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(step, loss.item())


train()
dist.destroy_process_group()
