"""Pipeline stages of a hybrid model: dense layers on the first stage, dense and MoE on the second.

Each stage has an optimizer for its dense and one for its expert parameters; the norm of the
gradients is that of all stages. torchrun --nproc-per-node 2 grad_norm_without_experts.py
"""

import math
import os

import torch
import torch.distributed as dist
from torch import nn

CORRECTED = os.environ.get("HANG") == "corrected"


class ExpertLayer(nn.Module):
    def __init__(self, dim, num_experts=2):
        super().__init__()
        self.router = nn.Linear(dim, num_experts)
        self.experts = nn.ModuleList(nn.Linear(dim, dim) for _ in range(num_experts))

    def forward(self, x):
        scores = self.router(x).softmax(-1)
        outputs = torch.stack([expert(x) for expert in self.experts], -1)
        return x + (outputs * scores[:, None, :]).sum(-1)


class StageOptimizer:
    """Adam for one kind of parameter, clipped by the norm over all stages."""

    def __init__(self, params, device):
        self.params, self.device = list(params), device
        self.adam = torch.optim.Adam(self.params, lr=1e-3) if self.params else None

    def grad_norm(self):
        total = torch.zeros(1, device=self.device)
        for p in self.params:
            total += p.grad.norm() ** 2
        dist.all_reduce(total)
        return math.sqrt(total.item())

    def step(self, scale):
        for p in self.params:
            p.grad *= scale
        if self.adam is not None:
            self.adam.step()
            self.adam.zero_grad()


class ChainedOptimizer:
    def __init__(self, module, device):
        named = list(module.named_parameters())
        kinds = (
            [p for n, p in named if "experts" not in n],
            [p for n, p in named if "experts" in n],
        )
        self.optimizers = [
            StageOptimizer(params, device)
            for params in kinds
            if params or CORRECTED  # HANG
        ]

    def step(self, max_norm=1.0):
        norm = math.sqrt(sum(o.grad_norm() ** 2 for o in self.optimizers))
        for optimizer in self.optimizers:
            optimizer.step(min(1.0, max_norm / (norm + 1e-6)))
        return norm


def run_stage(stage, x, rank):
    if rank == 0:
        out = stage(x)
        dist.send(out.detach().contiguous(), dst=1)
        grad = torch.empty_like(out)
        dist.recv(grad, src=1)
        out.backward(grad)
    else:
        received = torch.empty_like(x)
        dist.recv(received, src=0)
        received.requires_grad_(True)
        stage(received).square().mean().backward()
        dist.send(received.grad.contiguous(), dst=0)


dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
rank = dist.get_rank()
device = torch.device("cpu")
if torch.cuda.is_available():
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
torch.manual_seed(rank)
stage = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()), nn.Sequential(ExpertLayer(8), nn.Linear(8, 1))]
stage = stage[rank].to(device)
optimizer = ChainedOptimizer(stage, device)
for step in range(3):
    run_stage(stage, torch.randn(4, 8, device=device), rank)
    norm = optimizer.step()
    print(f"stage {rank} step {step} norm {norm:.4f}")
dist.destroy_process_group()
