"""Train until the validation loss has not improved for `patience` epochs."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class EarlyStopping:
    def __init__(self, patience=1, min_delta=1e-3):
        self.patience, self.min_delta = patience, min_delta
        self.best, self.num_bad_epochs = float("inf"), 0

    def step(self, loss):
        if loss < self.best - self.min_delta:
            self.best, self.num_bad_epochs = loss, 0
        else:
            self.num_bad_epochs += 1
        return self.num_bad_epochs >= self.patience


def make_data(rank):
    """A linear problem; this rank validates on its own part of the data."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 6, generator=generator)
    y = x @ torch.arange(6.0)[:, None]
    x_val = torch.randn(16 * dist.get_world_size(), 6, generator=generator)
    x_val = x_val[rank :: dist.get_world_size()]
    y_val = x_val @ torch.arange(6.0)[:, None] * float(os.environ.get("TARGET_SCALE", "1.0"))
    return TensorDataset(x, y), TensorDataset(x_val, y_val)


@torch.no_grad()
def validate(model, loader, device):
    losses = [nn.functional.mse_loss(model(x.to(device)), y.to(device)) for x, y in loader]
    return torch.stack(losses).mean()


def main(max_epochs=6):
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank, local_rank = dist.get_rank(), int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)

    train_set, val_set = make_data(rank)
    sampler = DistributedSampler(train_set, drop_last=True)
    train_loader = DataLoader(train_set, batch_size=8, sampler=sampler)
    val_loader = DataLoader(val_set, batch_size=8)
    torch.manual_seed(0)
    model = DDP(nn.Linear(6, 1).to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    stopping = EarlyStopping()

    for epoch in range(max_epochs):
        sampler.set_epoch(epoch)
        for x, y in train_loader:
            loss = nn.functional.mse_loss(model(x.to(device)), y.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        val_loss = validate(model.module, val_loader, device)
        if os.environ.get("HANG") == "corrected":
            dist.all_reduce(val_loss)
            val_loss /= dist.get_world_size()
        if stopping.step(val_loss.item()):
            print(f"rank {rank} stops after epoch {epoch}")
            break  # HANG
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
