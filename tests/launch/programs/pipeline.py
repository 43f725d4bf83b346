"""Pipeline parallelism over four stages, each with data parallelism over two ranks."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
device = torch.device("cuda", torch.cuda.current_device())
mesh = init_device_mesh("cuda", (2, 4), mesh_dim_names=("dp", "pp"))
stage_index = mesh["pp"].get_local_rank()
torch.manual_seed(stage_index)
part = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)).to(device)
fully_shard(part, mesh=mesh["dp"])
stage = PipelineStage(part, stage_index, 4, device, group=mesh["pp"].get_group())
schedule = Schedule1F1B(
    stage, n_microbatches=4, loss_fn=lambda y, target: (y - target).square().mean()
)
optimizer = torch.optim.AdamW(part.parameters())
for _ in range(10):
    optimizer.zero_grad()
    inputs, target = torch.randn(8, 64, device=device), torch.randn(8, 64, device=device)
    losses = []
    if stage_index == 0:
        schedule.step(inputs)
    elif stage_index == 3:
        schedule.step(target=target, losses=losses)
        print("loss", torch.stack(losses).mean().item())
    else:
        schedule.step()
    optimizer.step()
dist.destroy_process_group()
