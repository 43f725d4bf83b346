"""A trainer with an optimizer of its own: flat buffers, a check for overflow, a global norm.

It reads values in the ways of trainers with sharded optimizers, and skips steps that overflow.
"""

import os

import torch
import torch.distributed as dist
from torch import nn


class DataParallel(nn.Module):
    """Keeps gradients in flat buffers, in an attribute that hides `nn.Module.buffers`."""

    def __init__(self, module):
        super().__init__()
        self.module = module
        self.buffers = [torch.zeros(sum(p.numel() for p in module.parameters()), device="cuda")]

    def forward(self, x):
        return self.module(x)

    def reduce_gradients(self):
        gradients = [parameter.grad.flatten() for parameter in self.module.parameters()]
        self.buffers[0].copy_(torch.cat(gradients))
        dist.all_reduce(self.buffers[0])


def has_overflow(gradients):
    count = torch.zeros([1], device="cuda")
    for gradient in gradients:
        count += torch.logical_or(gradient.isinf(), gradient.isnan()).float().max()
    overflow = count.bool().byte()
    dist.all_reduce(overflow, op=dist.ReduceOp.MAX)
    return bool(overflow[0].item())


def is_tracked(tracker, gradients):
    tracker.logical_or_(torch.cat(gradients).isnan().any())
    overflow = tracker.clone().to(torch.uint8)
    tracker.zero_()
    return bool(overflow.item())


torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
model = DataParallel(nn.Linear(32, 32).cuda())
for parameter in model.parameters():
    if parameter.type() != "torch.cuda.FloatTensor":
        raise TypeError(f"{parameter.type()} is not on the GPU")
optimizer = torch.optim.AdamW(model.parameters())
scale = torch.tensor([1.0], device="cuda")
tracker = torch.zeros(1, dtype=torch.bool, device="cuda")
for _ in range(4):
    (scale * model(torch.randn(8, 32, device="cuda")).square().mean()).backward()
    model.reduce_gradients()
    gradients = [parameter.grad.flatten() for parameter in model.parameters()]
    if has_overflow(gradients) or is_tracked(tracker, gradients):
        continue
    norm = torch.norm(torch.tensor([[torch.norm(gradient) for gradient in gradients]]))
    torch.nn.utils.clip_grads_with_norm_(model.parameters(), 1.0, norm)
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
