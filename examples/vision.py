"""A small residual network for images under DistributedDataParallel.

python examples/vision.py                                   # one of 8 simulated ranks
torchrun --nproc-per-node 8 --no-python shardscope trace examples/vision.py
"""

import torch
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

WIDTHS, NUM_CLASSES = (32, 64, 128), 100


class Residual(nn.Module):
    """Two convolutions beside a shortcut."""

    def __init__(self, before, after, *, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride=stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(after)
        self.conv2 = nn.Conv2d(after, after, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(after)
        self.shortcut = nn.Conv2d(before, after, 1, stride=stride, bias=False)

    def forward(self, x):
        h = functional.relu(self.norm1(self.conv1(x)))
        return functional.relu(self.norm2(self.conv2(h)) + self.shortcut(x))


class ResNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, WIDTHS[0], 3, padding=1, bias=False)
        self.stages = nn.Sequential(
            *(
                Residual(before, after, stride=2)
                for before, after in zip((WIDTHS[0], *WIDTHS), WIDTHS, strict=False)
            )
        )
        self.head = nn.Linear(WIDTHS[-1], NUM_CLASSES)

    def forward(self, images):
        return self.head(self.stages(self.stem(images)).mean(dim=(-2, -1)))


def model():
    return ResNet()


def batch(model):
    return torch.randn(4, 3, 32, 32)


def parallelize(model, mesh):
    return DistributedDataParallel(model, process_group=mesh.get_group(), bucket_cap_mb=0.5)


def step(model, images):
    labels = torch.zeros(len(images), dtype=torch.long)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):  # DDP lays out its buckets after the first step
        optimizer.zero_grad()
        functional.cross_entropy(model(images), labels).backward()
        optimizer.step()


if __name__ == "__main__":
    from shardscope.cli import main

    main(["trace", __file__, "--mesh", "dp=8"])
