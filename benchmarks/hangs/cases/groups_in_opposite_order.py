"""Recommendation model: sharded embedding tables and a dense part, with a process group for each.

A rank with many pending updates averages the dense part first, before it waits for the exchange.
torchrun --nproc-per-node 2 groups_in_opposite_order.py
"""

import os

import torch
import torch.distributed as dist
from torch import nn

ROWS, DIM = 16, 4
SYNC_AFTER = 4  # pending updates of different rows
CORRECTED = os.environ.get("HANG") == "corrected"


class ShardedTable:
    """Rows of an embedding table by rank; ids are asked from the rank that has them."""

    def __init__(self, group, device):
        self.group, self.num_shards = group, dist.get_world_size(group)
        generator = torch.Generator().manual_seed(dist.get_rank(group))
        self.rows = torch.randn(ROWS, DIM, generator=generator).to(device)
        self.num_pending = 0

    def exchange(self, ids):
        """Ask each shard for as many rows; returns the rows in the order of the ids."""
        wanted = ids.view(self.num_shards, -1)
        asked = torch.empty_like(wanted)
        dist.all_to_all_single(asked, wanted, group=self.group)
        found = self.rows[asked % ROWS]
        received = torch.empty_like(found)
        dist.all_to_all_single(received, found, group=self.group)
        return received.flatten(0, 1)

    def update(self, ids, gradient):
        self.rows.index_add_(0, ids % ROWS, gradient, alpha=-0.1)
        self.num_pending = len(ids.unique())


def average(module, group):
    for p in module.parameters():
        dist.all_reduce(p.data, group=group)
        p.data /= dist.get_world_size(group)


def main():
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank, local_rank = dist.get_rank(), int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    sparse_group, dense_group = dist.new_group(), dist.new_group()
    table = ShardedTable(sparse_group, device)
    torch.manual_seed(0)
    over_arch = nn.Sequential(nn.Linear(DIM, 8), nn.ReLU(), nn.Linear(8, 1)).to(device)
    optimizer = torch.optim.SGD(over_arch.parameters(), lr=0.05)
    num_ids = int(os.environ.get("NUM_IDS", "2"))  # different ones in the log of this rank
    generator = torch.Generator().manual_seed(rank)
    for step in range(4):
        ids = torch.randint(num_ids, (8,), generator=generator).to(device)
        is_busy = not CORRECTED and table.num_pending > SYNC_AFTER
        if is_busy:  # HANG
            average(over_arch, dense_group)
        rows = table.exchange(ids).requires_grad_()
        if not is_busy:
            average(over_arch, dense_group)
        loss = over_arch(rows).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        table.update(ids, rows.grad)
        if rank == 0:
            print(f"step {step}: {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
