"""GPipe by hand over two stages; the receive buffers have the shape of the first micro-batch."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

MICRO_BATCH = 4
CORRECTED = os.environ.get("HANG") == "corrected"


class Stage:
    """A part of the model on this rank, which talks to the ranks before and after it."""

    def __init__(self, module, device):
        self.module, self.device = module.to(device), device
        self.rank, self.last = dist.get_rank(), dist.get_world_size() - 1
        self.buffer_shape = None

    def receive_shape(self):
        shape = torch.empty(2, dtype=torch.long, device=self.device)
        dist.recv(shape, self.rank - 1)
        return shape.tolist()

    def forward(self, x):
        if self.rank > 0:
            if CORRECTED or self.buffer_shape is None:
                self.buffer_shape = self.receive_shape()
            x = torch.empty(self.buffer_shape, device=self.device)  # HANG
            dist.recv(x, self.rank - 1)
            x.requires_grad_()
        out = self.module(x)
        if self.rank < self.last:
            if CORRECTED or self.buffer_shape is None:
                self.buffer_shape = list(out.shape)
                dist.send(torch.tensor(out.shape, device=self.device), self.rank + 1)
            dist.send(out.detach(), self.rank + 1)
        return x, out

    def backward(self, x, out, y):
        if self.rank == self.last:
            loss = F.cross_entropy(out[: len(y)], y[: len(out)])
            loss.backward()
        else:
            grad = torch.empty_like(out)
            dist.recv(grad, self.rank + 1)
            out.backward(grad)
            loss = None
        if self.rank > 0:
            dist.send(x.grad, self.rank - 1)
        return loss


def main():
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.manual_seed(0)
    parts = [nn.Sequential(nn.Linear(6, 12), nn.ReLU()), nn.Linear(12, 3)]
    stage = Stage(parts[dist.get_rank()], device)
    optimizer = torch.optim.SGD(stage.module.parameters(), lr=0.1)
    num_samples = int(os.environ.get("NUM_SAMPLES", "16"))
    x = torch.randn(num_samples, 6)
    loader = DataLoader(TensorDataset(x, x[:, :3].argmax(-1)), batch_size=2 * MICRO_BATCH)
    for step, (x, y) in enumerate(loader):
        parts = x.to(device).split(MICRO_BATCH), y.to(device).split(MICRO_BATCH)
        states = [(*stage.forward(x), y) for x, y in zip(*parts, strict=True)]
        losses = [stage.backward(*state) for state in states]
        optimizer.step()
        optimizer.zero_grad()
        if losses[0] is not None:
            print(f"step {step}: {torch.stack(losses).mean().item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
