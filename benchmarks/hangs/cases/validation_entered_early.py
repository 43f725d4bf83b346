# Training with evaluation at the end of each epoch; batches hold at most MAX_TOKENS tokens.
import os
import random

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, Sampler

MAX_TOKENS = 64
AGREE_ON_END = os.environ.get("HANG") == "corrected"
DURATION = int(os.environ.get("DURATION", "16"))  # of the utterances on this rank


class Utterances(Dataset):
    def __len__(self):
        return 48

    def __getitem__(self, index):
        rng = random.Random(index)
        return torch.tensor([rng.randrange(32) for _ in range(DURATION)])


class DurationSampler(Sampler):
    """Every world_size-th utterance, in batches that are filled by duration."""

    def __iter__(self):
        batch, num_tokens = [], 0
        for index in range(dist.get_rank(), len(Utterances()), dist.get_world_size()):
            if num_tokens + DURATION > MAX_TOKENS:
                yield batch
                batch, num_tokens = [], 0
            batch.append(index)
            num_tokens += DURATION
        yield batch


class Predictor(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(32, 24)
        self.rnn = nn.GRU(24, 24, batch_first=True)
        self.out = nn.Linear(24, 32)

    def forward(self, tokens):
        return self.out(self.rnn(self.embed(tokens))[0])


def compute_loss(model, tokens):
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def any_rank(flag, device):
    value = torch.tensor(float(flag), device=device)
    dist.all_reduce(value)
    return value.item() > 0


def validate(model, device):
    """Sum the loss and the number of tokens over all ranks."""
    tokens = torch.arange(32, device=device).view(2, 16)
    with torch.no_grad():
        totals = torch.stack([compute_loss(model.module, tokens), tokens.new_tensor(32).float()])
    dist.all_reduce(totals)
    return (totals[0] / dist.get_world_size()).item()


def train_one_epoch(model, optimizer, device):
    batches = iter(DataLoader(Utterances(), batch_sampler=DurationSampler()))
    while True:
        tokens = next(batches, None)
        if AGREE_ON_END and any_rank(tokens is None, device):
            return
        if tokens is None:
            return  # HANG
        loss = compute_loss(model, tokens.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    torch.manual_seed(0)
    model = DistributedDataParallel(Predictor().to(device))
    optimizer = torch.optim.Adam(model.parameters())
    for epoch in range(2):
        train_one_epoch(model, optimizer, device)
        loss = validate(model, device)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: validation loss {loss:.3f}")
    dist.destroy_process_group()
