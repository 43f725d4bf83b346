"""Pipelines of torch.distributed.pipelining, with replicas if there are more ranks than stages."""

import argparse
import os

import torch
from common import finish, setup
from torch import distributed as dist
from torch import nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import mse_loss

SCHEDULES = {
    "gpipe": (pipelining.ScheduleGPipe, 1),
    "1f1b": (pipelining.Schedule1F1B, 1),
    "looped": (pipelining.ScheduleLoopedBFS, 2),
    "interleaved": (pipelining.ScheduleInterleaved1F1B, 2),
    "zero-bubble": (pipelining.ScheduleInterleavedZeroBubble, 2),
    "zbv": (pipelining.ScheduleZBVZeroBubble, 2),
}
DIM = 8


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--schedule", choices=SCHEDULES, default="1f1b")
    parser.add_argument("--pp", type=int, default=2)
    parser.add_argument("--micro-batches", type=int, default=4)
    args = parser.parse_args()
    rank, world_size, device = setup()
    mesh = init_device_mesh(
        device.type, (world_size // args.pp, args.pp), mesh_dim_names=("dp", "pp")
    )
    pp_rank, dp_group = mesh.get_local_rank("pp"), mesh.get_group("dp")
    schedule_class, num_parts = SCHEDULES[args.schedule]
    num_stages = args.pp * num_parts
    indices = [pp_rank + args.pp * part for part in range(num_parts)]
    if args.schedule == "zbv":
        indices = [pp_rank, num_stages - 1 - pp_rank]
    modules = []
    for index in indices:
        torch.manual_seed(index)
        modules.append(nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh()).to(device))
    stages = [
        pipelining.PipelineStage(module, index, num_stages, device, group=mesh.get_group("pp"))
        for module, index in zip(modules, indices, strict=True)
    ]
    argument = stages if num_parts > 1 else stages[0]
    schedule = schedule_class(argument, args.micro_batches, loss_fn=mse_loss)
    parameters = [p for module in modules for p in module.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    generator = torch.Generator().manual_seed(mesh.get_local_rank("dp"))
    losses = []
    for _ in range(2):
        x = torch.randn(2 * args.micro_batches, DIM, generator=generator).to(device)
        inputs = (x,) if 0 in indices else ()
        keywords = {"target": x.roll(1, -1), "losses": losses} if num_stages - 1 in indices else {}
        schedule.step(*inputs, **keywords)
        for p in parameters:
            dist.all_reduce(p.grad, group=dp_group)
        optimizer.step()
        optimizer.zero_grad()
    if losses and os.environ.get("VERBOSE"):
        print(f"rank {rank}: {torch.stack(losses).mean().item():.4f}")
    finish("done")


if __name__ == "__main__":
    main()
