"""GRPO on multi-turn rollouts: the loss is computed in chunks, as many on each rank.

Ranks with fewer samples run dummy chunks, so that all gather the sharded policy equally often.
    torchrun --nproc-per-node 2 dummy_chunks_without_backward.py
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, Dataset, DistributedSampler

CHUNK = 2
CORRECTED = os.environ.get("HANG") == "corrected"


def build_policy(device):
    torch.manual_seed(0)
    policy = nn.Sequential(
        nn.Embedding(48, 16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16), nn.Linear(16, 48)
    ).to(device)
    for layer in policy:
        if sum(1 for _ in layer.parameters()):
            fully_shard(layer)
    return fully_shard(policy)


class Rollouts(Dataset):
    """Conversations: a row of token ids per turn, and the advantage of each turn."""

    num_turns = int(os.environ.get("NUM_TURNS", "3"))

    def __len__(self):
        return 8

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        ids = torch.randint(48, (self.num_turns, 10), generator=generator)
        return ids, torch.randn(self.num_turns, generator=generator)


def collate(conversations):
    """All turns of the batch."""
    ids, advantages = zip(*conversations, strict=True)
    return torch.cat(ids), torch.cat(advantages)


def chunk_loss(policy, ids, advantages):
    log_probs = policy(ids[:, :-1]).log_softmax(-1)
    chosen = log_probs.gather(-1, ids[:, 1:, None]).squeeze(-1)
    return -(chosen.mean(-1) * advantages).sum()


def compute_loss(policy, ids, advantages):
    num_chunks = torch.tensor(-(-len(ids) // CHUNK), device=ids.device)
    dist.all_reduce(num_chunks, op=dist.ReduceOp.MAX)
    losses = []
    for index in range(int(num_chunks)):
        rows = slice(index * CHUNK, (index + 1) * CHUNK)
        if index * CHUNK < len(ids):
            losses.append(chunk_loss(policy, ids[rows], advantages[rows]))
        else:
            dummy = chunk_loss(policy, ids[:1], torch.zeros_like(advantages[:1]))  # HANG
            if CORRECTED:
                losses.append(dummy)
    return torch.stack(losses).sum() / len(ids)


def main():
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank, local_rank = dist.get_rank(), int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)

    policy = build_policy(device)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-4)
    sampler = DistributedSampler(Rollouts())
    loader = DataLoader(Rollouts(), batch_size=2, sampler=sampler, collate_fn=collate)
    for iteration, (ids, advantages) in enumerate(loader):
        loss = compute_loss(policy, ids.to(device), advantages.to(device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            print(f"iteration {iteration} loss {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


main()
