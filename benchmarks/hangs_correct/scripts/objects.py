"""Object collectives, issued on every rank with whatever each has."""

import argparse

import torch
import torch.distributed as dist
from common import batches, finish, mlp, setup
from torch.nn.parallel import DistributedDataParallel as DDP

CALLS = ["all-gather", "gather", "broadcast", "scatter", "empty"]


def exchange(call, value, rank, world_size):
    if call == "all-gather":
        values = [None] * world_size
        dist.all_gather_object(values, value)
        return values
    if call == "gather":
        values = [None] * world_size if rank == 0 else None
        dist.gather_object(value, values, dst=0)
        return values
    if call == "broadcast":
        values = [value, {"of": rank}] if rank == 0 else [None, None]
        dist.broadcast_object_list(values, src=0)
        return values
    if call == "scatter":
        received = [None]
        parts = [{"part": index} for index in range(world_size)] if rank == 0 else None
        dist.scatter_object_list(received, parts, src=0)
        return received
    values = [None] * world_size
    dist.all_gather_object(values, value if rank == 0 else {})  # ranks without metrics send none
    return [v for v in values if v]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--call", choices=CALLS, default="all-gather")
    args = parser.parse_args()
    rank, world_size, device = setup()
    model = DDP(mlp(6, 12, 1).to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    received = None
    for step, (x, y) in enumerate(batches(3, rank)):
        loss = (model(x.to(device)) - y.to(device)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        value = {"step": step, "loss": loss.item(), "texts": ["a" * (3 + rank * step)]}
        received = exchange(args.call, value, rank, world_size)
    finish(f"rank 0 received {received}")


if __name__ == "__main__":
    main()
