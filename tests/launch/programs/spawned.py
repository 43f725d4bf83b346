"""A program that starts its own processes with mp.spawn, one for each GPU of the host."""

import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import fully_shard


def train(rank, world_size, width):
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ["MASTER_PORT"] = "12355"
    dist.init_process_group("nccl", rank=rank, world_size=world_size)
    torch.cuda.set_device(rank)
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(4))).to(rank)
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(50):
        loss = model(torch.randn(8, width, device=rank)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"rank {rank}: {loss.detach().cpu().numpy()}")
    dist.destroy_process_group()


if __name__ == "__main__":
    size = torch.cuda.device_count()
    mp.spawn(train, args=(size, 64), nprocs=size, join=True)
