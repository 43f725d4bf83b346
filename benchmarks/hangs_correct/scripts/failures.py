"""Errors of single ranks: raised again, replaced, agreed on, or retried without a collective."""

import argparse

import torch
import torch.distributed as dist
from common import any_rank, finish, mlp, setup
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

POLICIES = [
    "substitute",
    "skip-together",
    "retry-load",
    "reraise",
    "reraise-memory",
    "default-value",
]


class Files:
    """Batches by number; the last rank reads the second file at the third attempt."""

    def __init__(self, rank, world_size, is_broken):
        self.is_broken = is_broken and rank == world_size - 1
        self.rank, self.attempts = rank, 0

    def read(self, index):
        if self.is_broken and index == 1:
            self.attempts += 1
            if self.attempts < 3:
                raise OSError(f"cannot read file {index}")
        generator = torch.Generator().manual_seed(31 * index + self.rank)
        x = torch.randn(8, 6, generator=generator)
        return x, x.sum(-1, keepdim=True)


def load(files, index, policy):
    try:
        return files.read(index)
    except OSError:
        if policy == "reraise":
            raise
        if policy == "retry-load":
            for _ in range(3):
                try:
                    return files.read(index)
                except OSError:
                    continue
        if policy == "skip-together":
            return None
        if policy == "default-value":
            return torch.zeros(8, 6), torch.zeros(8, 1)
        return files.read(0)


def train_step(model, optimizer, x, y, policy):
    try:
        loss = (model(x) - y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    except torch.OutOfMemoryError:
        if policy != "reraise-memory":
            raise
        print("out of memory; use a smaller batch", flush=True)
        raise
    return loss


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--policy", choices=POLICIES, default="substitute")
    args = parser.parse_args()
    rank, world_size, device = setup()
    is_sharded = args.policy in ("skip-together", "reraise-memory")
    net = mlp(6, 12, 1).to(device)
    model = fully_shard(net) if is_sharded else DDP(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    files = Files(rank, world_size, is_broken=not args.policy.startswith("reraise"))
    for index in range(4):
        batch = load(files, index, args.policy)
        if args.policy == "skip-together" and any_rank(batch is None, device):
            continue
        x, y = batch
        train_step(model, optimizer, x.to(device), y.to(device), args.policy)
    dist.barrier()
    finish("done")


if __name__ == "__main__":
    main()
