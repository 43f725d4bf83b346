"""A DDP program as torchrun starts it: data loader, sampler, gradient scaler, checkpoints, logs."""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class Numbers(Dataset):
    def __len__(self):
        return 4096

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        return torch.randn(32, generator=generator), index % 10


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--out", default="checkpoints")
    arguments = parser.parse_args()
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    model = nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model = DistributedDataParallel(model.cuda(), device_ids=[local_rank])
    scaler = torch.amp.GradScaler("cuda")
    data = Numbers()
    sampler = DistributedSampler(data)
    loader = DataLoader(
        data, batch_size=16, sampler=sampler, num_workers=arguments.workers, pin_memory=True
    )
    criterion = nn.CrossEntropyLoss()
    for epoch in range(100):
        sampler.set_epoch(epoch)
        for index, (inputs, labels) in enumerate(loader):
            inputs, labels = inputs.cuda(non_blocking=True), labels.to(local_rank)
            with torch.autocast("cuda", dtype=torch.float16):
                loss = criterion(model(inputs), labels)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            if torch.isnan(loss):
                raise RuntimeError("the loss is not a number")
            if dist.get_rank() == 0:
                print(f"epoch {epoch} step {index} loss {loss.item():.3f}")
                os.makedirs(arguments.out, exist_ok=True)
                torch.save(model.module.state_dict(), os.path.join(arguments.out, "last.pt"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
