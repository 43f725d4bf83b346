"""Distributed Shampoo in small: each rank preconditions some parameters, then all gather them."""

import os

import torch
import torch.distributed as dist
from torch import nn

CORRECTED = os.environ.get("HANG") == "corrected"


class DistributedShampoo(torch.optim.Optimizer):
    """Parameters are dealt out to the ranks; updates are exchanged with one all_gather."""

    def __init__(self, params, lr=0.05):
        super().__init__(params, {"lr": lr})
        self.params = [p for group in self.param_groups for p in group["params"]]
        rank, world_size = dist.get_rank(), dist.get_world_size()
        self.owned = self.params[rank::world_size]
        self.length = max(
            sum(p.numel() for p in self.params[r::world_size]) for r in range(world_size)
        )

    def precondition(self, p):
        state = self.state[p]
        factor = state.setdefault("factor", torch.zeros(p.shape[0], p.shape[0], device=p.device))
        factor += p.grad @ p.grad.T
        values, vectors = torch.linalg.eigh(factor)
        return vectors @ (vectors.T @ p.grad / values.clamp(min=1e-4).sqrt()[:, None])

    @torch.no_grad()
    def step(self):
        owned = [p for p in self.owned if p.grad is not None]
        if not owned and not CORRECTED:
            return  # HANG
        updates = {p: self.precondition(p) for p in owned}
        zeros = [updates.get(p, torch.zeros_like(p)).flatten() for p in self.owned]
        own = torch.cat(zeros)
        own = nn.functional.pad(own, (0, self.length - len(own)))
        gathered = own.new_empty(dist.get_world_size() * self.length)
        dist.all_gather_into_tensor(gathered, own)
        for rank, part in enumerate(gathered.view(dist.get_world_size(), -1)):
            offset = 0
            for p in self.params[rank :: dist.get_world_size()]:
                p -= self.defaults["lr"] * part[offset : offset + p.numel()].view_as(p)
                offset += p.numel()


class Adapter(nn.Module):
    def __init__(self, dim=6):
        super().__init__()
        self.down = nn.Linear(dim, 3, bias=False)
        self.up = nn.Linear(3, dim, bias=False)

    def forward(self, x):
        return x + self.up(torch.tanh(self.down(x)))


def main():
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank, local_rank = dist.get_rank(), int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.manual_seed(0)
    model = Adapter().to(device)
    optimizer = DistributedShampoo(model.parameters())
    if "FREEZE" in os.environ:  # the names of parameters that are not trained, as in "up.weight"
        model.get_parameter(os.environ["FREEZE"]).requires_grad_(False)
    generator = torch.Generator().manual_seed(rank)
    for step in range(3):
        x = torch.randn(8, 6, generator=generator).to(device)
        loss = (model(x) - 2 * x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        for p in model.parameters():
            if p.grad is not None:
                dist.all_reduce(p.grad)
        optimizer.step()
        if rank == 0:
            print(f"step {step}: {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
