"""Text-to-image training on tar shards; a broken archive must not end the run."""

import logging
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, IterableDataset

logger = logging.getLogger(__name__)
CORRECTED = os.environ.get("HANG") == "corrected"


class TarShards(IterableDataset):
    """Samples of this rank; with ARCHIVE=broken the file is cut after some of them."""

    def __init__(self, rank, num_samples=12):
        self.rank, self.num_samples = rank, num_samples

    def __iter__(self):
        generator = torch.Generator().manual_seed(self.rank)
        for index in range(self.num_samples):
            if os.environ.get("ARCHIVE") == "broken" and index == 5:
                raise EOFError(f"unexpected end of shard-{self.rank:05d}.tar")
            yield torch.randn(8, generator=generator)


def batches(loader):
    """The batches of a loader; an error of a worker is logged."""
    try:
        yield from loader
    except (EOFError, RuntimeError) as error:
        logger.warning("dataset ends early: %s", str(error).splitlines()[-1])
        return  # HANG


def same_number(iterator, device):
    """As many batches as the rank with the fewest has."""
    while True:
        batch = next(iterator, None)
        flag = torch.tensor(int(batch is not None), device=device)
        dist.all_reduce(flag, op=dist.ReduceOp.MIN)
        if not flag:
            return
        yield batch


def main():
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank, local_rank = dist.get_rank(), int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.SiLU(), nn.Linear(32, 8)).to(device)
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(TarShards(rank), batch_size=2, num_workers=1)
    for epoch in range(2):
        iterator = batches(loader)
        if CORRECTED:
            iterator = same_number(iterator, device)
        for step, x in enumerate(iterator):
            x = x.to(device)
            noise = torch.randn_like(x)
            loss = (model(x + noise) - noise).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if rank == 0:
                print(f"epoch {epoch} step {step}: {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
