"""DDP over shards that were written per rank: each rank reads its own file until it ends."""

import contextlib
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset

CORRECTED = os.environ.get("HANG") == "corrected"


class Shard(IterableDataset):
    """The samples of one rank. A real one would open f"{prefix}-{rank:05d}.tar"."""

    def __init__(self, rank, num_samples):
        self.rank, self.num_samples = rank, num_samples

    def __iter__(self):
        generator = torch.Generator().manual_seed(self.rank)
        for _ in range(self.num_samples):
            x = torch.randn(10, generator=generator)
            yield x, (x.sum() > 0).float()


def main():
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank, local_rank = dist.get_rank(), int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)

    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(10, 32), nn.Tanh(), nn.Linear(32, 1)).to(device)
    model = DDP(net, device_ids=[local_rank] if device.type == "cuda" else None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    criterion = nn.BCEWithLogitsLoss()
    loader = DataLoader(Shard(rank, int(os.environ.get("NUM_SAMPLES", "24"))), batch_size=8)

    for epoch in range(2):
        total = 0.0
        with Join([model]) if CORRECTED else contextlib.nullcontext():
            for x, y in loader:  # HANG
                loss = criterion(model(x.to(device)).squeeze(-1), y.to(device))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                total += loss.item()
        dist.barrier()
        if rank == 0:
            print(f"epoch {epoch}: {total:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
