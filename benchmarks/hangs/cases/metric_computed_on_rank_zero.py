"""Train with DDP, test on rank 0 with torchmetrics."""

import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.optim as optim
from torch.nn.parallel import DistributedDataParallel as DDP
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

NUM_CLASSES = 4


def setup():
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend)
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    return dist.get_rank(), device


def make_metrics(device):
    kwargs = {"num_classes": NUM_CLASSES}
    if os.environ.get("HANG") == "corrected":
        kwargs["sync_on_compute"] = False
    metrics = {"accuracy": MulticlassAccuracy(**kwargs), "f1": MulticlassF1Score(**kwargs)}
    return MetricCollection(metrics).to(device)


def train(model, optimizer, device, generator):
    model.train()
    for _ in range(3):
        x = torch.randn(12, 8, generator=generator).to(device)
        y = (x[:, :NUM_CLASSES] * 2).argmax(-1)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()


@torch.no_grad()
def test(model, metrics, device):
    model.eval()
    generator = torch.Generator().manual_seed(99)
    for _ in range(2):
        x = torch.randn(32, 8, generator=generator).to(device)
        metrics.update(model(x), x[:, :NUM_CLASSES].argmax(-1))
    result = metrics.compute()  # HANG
    metrics.reset()
    return {name: round(value.item(), 3) for name, value in result.items()}


def main():
    rank, device = setup()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, NUM_CLASSES)).to(device)
    model = DDP(net, broadcast_buffers=False)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    metrics = make_metrics(device)
    generator = torch.Generator().manual_seed(rank)
    for epoch in range(2):
        train(model, optimizer, device, generator)
        if rank == 0:
            print(epoch, test(model.module, metrics, device))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
