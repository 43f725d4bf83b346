"""Samplers that give each rank as many batches, by construction."""

import argparse

import torch
import torch.distributed as dist
from common import finish, mlp, setup
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Sampler, TensorDataset

KINDS = ["padded", "drop-last", "batches", "drawn-by-rank-zero", "same-seed"]


class EvenBatches(Sampler):
    """Batches of indices by rank; those that remain are dropped."""

    def __init__(self, length, batch_size, rank, world_size):
        self.batch_size, self.rank, self.world_size = batch_size, rank, world_size
        self.num_batches = length // (batch_size * world_size)

    def __len__(self):
        return self.num_batches

    def __iter__(self):
        for number in range(self.num_batches):
            start = (number * self.world_size + self.rank) * self.batch_size
            yield list(range(start, start + self.batch_size))


def draw(length, device):
    """A permutation that rank 0 has drawn."""
    order = (
        torch.randperm(length) if dist.get_rank() == 0 else torch.empty(length, dtype=torch.long)
    )
    order = order.to(device)
    dist.broadcast(order, src=0)
    return order.cpu()


def make_loader(kind, dataset, rank, world_size, device):
    if kind in ("padded", "drop-last"):
        sampler = DistributedSampler(dataset, drop_last=kind == "drop-last")
        return DataLoader(dataset, batch_size=4, sampler=sampler)
    if kind == "batches":
        sampler = EvenBatches(len(dataset), 4, rank, world_size)
        return DataLoader(dataset, batch_sampler=sampler)
    if kind == "drawn-by-rank-zero":
        order = draw(len(dataset), device)
    else:
        order = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(5))
    even = len(dataset) // world_size * world_size
    return DataLoader(dataset, batch_size=4, sampler=order[:even][rank::world_size].tolist())


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--kind", choices=KINDS, default="padded")
    args = parser.parse_args()
    rank, world_size, device = setup()
    x = torch.randn(27, 6)
    dataset = TensorDataset(x, x.sum(-1, keepdim=True))
    model = DDP(mlp(6, 12, 1).to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for epoch in range(2):
        loader = make_loader(args.kind, dataset, rank, world_size, device)
        if isinstance(loader.sampler, DistributedSampler):
            loader.sampler.set_epoch(epoch)
        for x, y in loader:
            loss = (model(x.to(device)) - y.to(device)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        dist.barrier()
    finish("done")


if __name__ == "__main__":
    main()
