"""Policy updates whose number of forward passes is the same on every rank."""

import argparse

import torch
import torch.distributed as dist
from common import TinyLM, any_rank, finish, setup, token_batches
from torch.distributed.fsdp import fully_shard

WAYS = ["fixed-length", "synced-generation", "dynamic-agreed", "filtered", "dummy-chunks"]


def log_probs(model, ids):
    logits = model(ids[:, :-1]).log_softmax(-1)
    return logits.gather(-1, ids[:, 1:, None]).squeeze(-1)


@torch.no_grad()
def generate(model, ids, way, device, max_length=12, end=3):
    """Greedy decoding; ranks that are done go on while another is not."""
    is_done = torch.zeros(len(ids), dtype=torch.bool, device=device)
    while ids.shape[1] < max_length:
        token = model(ids)[:, -1].argmax(-1).masked_fill(is_done, 0)
        ids = torch.cat([ids, token[:, None]], 1)
        is_done |= token == end
        if way == "synced-generation" and not any_rank(not is_done.all(), device):
            break
    return ids


def micro_batches(ids, way, rank, device):
    """Rows of each micro-batch, and whether they count."""
    if way == "dynamic-agreed":
        num_own = 1 + rank % 2
        count = torch.tensor(num_own, device=device)
        dist.all_reduce(count, op=dist.ReduceOp.MAX)
        return [(part, 1.0) for part in ids.tensor_split(int(count))]
    if way == "filtered":
        kept = ids[: len(ids) - rank % 2 * 2]  # this rank keeps fewer of its samples
        parts = list(kept.split(2))
        count = torch.tensor(len(parts), device=device)
        dist.all_reduce(count, op=dist.ReduceOp.MIN)
        return [(part, 1.0) for part in parts[: int(count)]]
    if way == "dummy-chunks":
        parts = [(part, 1.0) for part in ids.split(1 + rank % 2)]
        return parts + [(ids[:1], 0.0)] * (len(ids) - len(parts))
    return [(part, 1.0) for part in ids.split(2)]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--way", choices=WAYS, default="fixed-length")
    args = parser.parse_args()
    rank, _, device = setup()
    policy = TinyLM().to(device)
    for layer in policy.layers:
        fully_shard(layer)
    fully_shard(policy)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)
    for prompts in token_batches(2, rank, size=4, length=5):
        ids = generate(policy, prompts.to(device), args.way, device)
        for part, weight in micro_batches(ids, args.way, rank, device):
            (-log_probs(policy, part).mean() * weight).backward()
        optimizer.step()
        optimizer.zero_grad()
    finish("done")


if __name__ == "__main__":
    main()
