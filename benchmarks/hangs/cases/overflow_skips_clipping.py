"""fp16 training with a loss scale, and the model's two halves on two pipeline ranks."""

import os

import torch
import torch.distributed as dist
from torch import nn

CORRECTED = os.environ.get("HANG") == "corrected"


class FP16Optimizer:
    """SGD on fp32 parameters with a dynamic loss scale; the norm is that of all pipeline ranks."""

    def __init__(self, params, device, lr=0.05, max_norm=1.0):
        self.params, self.device = list(params), device
        self.lr, self.max_norm, self.scale = lr, max_norm, 2.0**10

    def check_overflow(self):
        found_inf = sum((~p.grad.isfinite()).sum() for p in self.params)
        found_inf = found_inf.clamp(max=1).float()
        if CORRECTED:
            dist.all_reduce(found_inf, op=dist.ReduceOp.MAX)
        return bool(found_inf.item())

    def clip_grad_norm(self):
        squares = sum((p.grad / self.scale).square().sum() for p in self.params)
        dist.all_reduce(squares)
        norm = squares.sqrt().item()
        for p in self.params:
            p.grad *= min(1.0, self.max_norm / (norm + 1e-6)) / self.scale
        return norm

    @torch.no_grad()
    def step(self):
        if self.check_overflow():
            self.scale /= 2
            self.zero_grad()
            return None  # HANG
        norm = self.clip_grad_norm()
        for p in self.params:
            p -= self.lr * p.grad
        self.zero_grad()
        return norm

    def zero_grad(self):
        for p in self.params:
            p.grad = None


def half_gradient(grad):
    """Gradients that leave a stage are fp16."""
    return grad.to(torch.float16).to(torch.float32)


def train_step(stage, optimizer, x, rank):
    if rank == 0:
        out = stage(x)
        dist.send(out.detach(), 1)
        grad = torch.empty_like(out)
        dist.recv(grad, 1)
        out.backward(half_gradient(grad))
    else:
        received = torch.empty(len(x), 8, device=x.device)
        dist.recv(received, 0)
        received.requires_grad_()
        loss = stage(received).square().mean() * optimizer.scale
        loss.backward()
        dist.send(received.grad, 0)
    return optimizer.step()


def main():
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank, local_rank = dist.get_rank(), int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.manual_seed(rank)
    stage = nn.Sequential(nn.Linear(6, 8), nn.ReLU()) if rank == 0 else nn.Linear(8, 1)
    stage = stage.to(device)
    if rank == 1:
        with torch.no_grad():  # a head that was initialized too large makes gradients overflow
            stage.weight *= float(os.environ.get("HEAD_SCALE", "1"))
    optimizer = FP16Optimizer(stage.parameters(), device)
    generator = torch.Generator().manual_seed(0)
    for step in range(3):
        x = torch.randn(4, 6, generator=generator).to(device)
        norm = train_step(stage, optimizer, x, rank)
        print(f"stage {rank} step {step} norm {norm} scale {optimizer.scale}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
