"""Ring exchange of activations at the borders of an image that is split over the ranks."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

CORRECTED = os.environ.get("HANG") == "corrected"


def exchange_borders(x):
    """The last column of the rank before and the first one of the rank after."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    before, after = (rank - 1) % world_size, (rank + 1) % world_size
    first, last = x[..., :1].contiguous(), x[..., -1:].contiguous()
    from_before, from_after = torch.empty_like(last), torch.empty_like(first)
    if CORRECTED:
        ops = [
            dist.P2POp(dist.isend, last, after, tag=0),
            dist.P2POp(dist.irecv, from_before, before, tag=0),
            dist.P2POp(dist.isend, first, before, tag=1),
            dist.P2POp(dist.irecv, from_after, after, tag=1),
        ]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
    else:
        dist.send(last, after, tag=0)  # HANG
        dist.recv(from_before, before, tag=0)
        dist.send(first, before, tag=1)
        dist.recv(from_after, after, tag=1)
    return torch.cat([from_before, x, from_after], -1)


class SpatialNet(nn.Module):
    """Convolutions of a strip of the image; borders carry no gradient."""

    def __init__(self, channels=4):
        super().__init__()
        self.conv1 = nn.Conv2d(1, channels, 3, padding=(1, 0))
        self.conv2 = nn.Conv2d(channels, 1, 3, padding=(1, 0))

    def pad(self, x):
        with torch.no_grad():
            padded = exchange_borders(x.detach())
        return torch.cat([padded[..., :1], x, padded[..., -1:]], -1)

    def forward(self, x):
        x = torch.relu(self.conv1(self.pad(x)))
        return self.conv2(self.pad(x))


def main():
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.manual_seed(0)
    net = SpatialNet().to(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    image = torch.randn(1, 1, 8, 8 * world_size)
    strip = image.chunk(world_size, -1)[rank].to(device)
    for step in range(3):
        loss = F.mse_loss(net(strip), strip)
        optimizer.zero_grad()
        loss.backward()
        for p in net.parameters():
            dist.all_reduce(p.grad)
        optimizer.step()
        print(f"rank {rank} step {step}: {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
