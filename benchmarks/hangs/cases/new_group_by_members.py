"""Auxiliary-loss-free balancing of experts: loads are summed by expert-parallel group."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

EP_SIZE = 2
_GROUPS: dict[tuple[int, ...], dist.ProcessGroup] = {}


def expert_parallel_group(ep_size=EP_SIZE):
    """The group of this rank's block of `ep_size` ranks, created when it is first asked for."""
    world_size, rank = dist.get_world_size(), dist.get_rank()
    if os.environ.get("HANG") == "corrected":
        for start in range(0, world_size, ep_size):
            ranks = tuple(range(start, start + ep_size))
            if ranks not in _GROUPS:
                _GROUPS[ranks] = dist.new_group(ranks)
    start = rank // ep_size * ep_size
    ranks = tuple(range(start, start + ep_size))
    if ranks not in _GROUPS:
        _GROUPS[ranks] = dist.new_group(ranks)  # HANG
    return _GROUPS[ranks]


class BalancedRouter(nn.Module):
    def __init__(self, dim, num_experts):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(num_experts, dim) * 0.1)
        self.register_buffer("bias", torch.zeros(num_experts), persistent=False)
        self.register_buffer("load", torch.zeros(num_experts), persistent=False)

    def forward(self, x):
        scores = torch.sigmoid(x @ self.weight.T)
        chosen = (scores + self.bias).argmax(-1)
        self.load += torch.bincount(chosen, minlength=len(self.bias))
        return scores.gather(-1, chosen[:, None])

    @torch.no_grad()
    def update_bias(self, rate=0.01):
        dist.all_reduce(self.load, group=expert_parallel_group())
        self.bias += rate * (self.load.mean() - self.load).sign()
        self.load.zero_()


def main():
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank, local_rank = dist.get_rank(), int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.manual_seed(0)
    router = BalancedRouter(8, 4).to(device)
    model = DDP(router, broadcast_buffers=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(rank)
    for step in range(3):
        loss = model(torch.randn(32, 8, generator=generator).to(device)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        router.update_bias()
        print(f"rank {rank} step {step} bias {router.bias.tolist()}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
