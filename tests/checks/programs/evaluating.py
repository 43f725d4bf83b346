"""A training program that stops early by a validation loss; all ranks validate on the same data."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main():
    dist.init_process_group("gloo")
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(48, 6, generator=generator)
    training = TensorDataset(x[:32], x[:32].sum(1, keepdim=True))
    validation = TensorDataset(x[32:], x[32:].sum(1, keepdim=True))
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(6, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    best = float("inf")
    for _ in range(4):
        for inputs, targets in DataLoader(training, 8, sampler=DistributedSampler(training)):
            (model(inputs) - targets).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            losses = [(model.module(i) - t).square().mean() for i, t in DataLoader(validation, 8)]
        loss = torch.stack(losses).mean().item()
        if not loss < best:
            break
        best = loss
    dist.barrier()
    dist.destroy_process_group()


main()
