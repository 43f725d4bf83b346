"""Actor update with dynamic batching: micro-batches hold what fits a token budget."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, Dataset, DistributedSampler

MAX_TOKENS = 64


def prepare_dynamic_batch(sequences, max_tokens, dp_group=None):
    """Split sequences into micro-batches of similar size; with a group, as many on every rank."""
    num_tokens = sum(len(s) for s in sequences)
    num_micro_batches = torch.tensor([-(-num_tokens // max_tokens)])
    if dp_group is not None:
        device = sequences[0].device
        num_micro_batches = num_micro_batches.to(device)
        dist.all_reduce(num_micro_batches, op=dist.ReduceOp.MAX, group=dp_group)
    count = int(num_micro_batches)
    if dp_group is None:
        count = min(count, len(sequences))
    by_length = sorted(sequences, key=len, reverse=True)
    return [by_length[index::count] for index in range(count)]


class Actor(nn.Module):
    def __init__(self, vocab=40, dim=16):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList(nn.Linear(dim, dim) for _ in range(2))
        self.head = nn.Linear(dim, vocab)

    def forward(self, sequences):
        ids = nn.utils.rnn.pad_sequence(sequences, batch_first=True)
        x = self.embed(ids)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        logits = self.head(x)[:, :-1].log_softmax(-1)
        return logits.gather(-1, ids[:, 1:, None]).squeeze(-1)


class DataParallelActor:
    def __init__(self, device):
        self.device = device
        torch.manual_seed(0)
        self.module = Actor().to(device)
        for layer in self.module.layers:
            fully_shard(layer)
        fully_shard(self.module)
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=1e-3)
        self.dp_group = dist.group.WORLD if os.environ.get("HANG") == "corrected" else None

    def update_policy(self, sequences):
        micro_batches = prepare_dynamic_batch(sequences, MAX_TOKENS, self.dp_group)  # HANG
        self.optimizer.zero_grad()
        total = 0.0
        for micro_batch in micro_batches:
            share = len(micro_batch) / len(sequences)  # 0 if there are more than sequences
            loss = -self.module(micro_batch or sequences[:1]).mean() * share
            loss.backward()
            total += loss.item()
        self.optimizer.step()
        return total


class Rollouts(Dataset):
    """Prompts with their responses."""

    response_length = int(os.environ.get("RESPONSE_LENGTH", "16"))

    def __len__(self):
        return 24

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        return torch.randint(40, (self.response_length,), generator=generator)


def main():
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank, local_rank = dist.get_rank(), int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    actor = DataParallelActor(device)
    sampler = DistributedSampler(Rollouts())
    loader = DataLoader(Rollouts(), batch_size=6, sampler=sampler, collate_fn=list)
    for iteration, sequences in enumerate(loader):
        loss = actor.update_policy([sequence.to(device) for sequence in sequences])
        if rank == 0:
            print(f"iteration {iteration}: {loss:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
