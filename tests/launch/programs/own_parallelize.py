"""A trainer that divides one mesh in several ways, and parallelizes by functions of its own.

Two ranks of a pipeline run two stages each. Dense layers are sharded over four ranks, experts over
two groups of two. The mask of attention is made by a compiled function outside the model.
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import ScheduleInterleaved1F1B
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

SEQUENCE, WIDTH, NUM_EXPERTS = 8192, 64, 4
make_mask = torch.compile(create_block_mask)


class Experts(nn.Module):
    """Sends each token to an expert, of which this rank has a part, and back."""

    def __init__(self, group):
        super().__init__()
        self.group = group
        self.router = nn.Linear(WIDTH, NUM_EXPERTS, bias=False)
        self.weight = nn.Parameter(torch.empty(NUM_EXPERTS, WIDTH, WIDTH))

    def exchange(self, x, sizes, own_sizes):
        return dist.nn.functional.all_to_all_single(
            x.new_empty(sum(sizes), WIDTH), x, sizes, own_sizes, group=self.group
        )

    def forward(self, x):
        chosen = self.router(x).argmax(-1)
        counts = torch.histc(chosen.float(), bins=NUM_EXPERTS, min=0, max=NUM_EXPERTS - 1).long()
        received = torch.empty_like(counts)
        dist.all_to_all_single(received, counts, group=self.group)
        sizes = received.view(self.group.size(), -1).sum(1).tolist()
        own_sizes = counts.view(self.group.size(), -1).sum(1).tolist()
        tokens = self.exchange(x[chosen.argsort()], sizes, own_sizes)
        expert = torch.arange(counts.numel(), device=x.device).repeat_interleave(received)
        local = self.weight.to_local() if hasattr(self.weight, "to_local") else self.weight
        mixed = tokens @ local.mean(0) + expert[:, None]
        return x + self.exchange(mixed, own_sizes, sizes)


class Stage(nn.Module):
    def __init__(self, group, mask):
        super().__init__()
        self.mask = mask
        self.norm = nn.LayerNorm(WIDTH)
        self.dense = nn.Linear(WIDTH, WIDTH)
        self.experts = Experts(group)

    def forward(self, x):
        heads = self.dense(self.norm(x)).view(1, SEQUENCE, 4, 16).transpose(1, 2)
        mixed = flex_attention(heads, heads, heads, block_mask=self.mask)
        return self.experts(mixed.transpose(1, 2).reshape(SEQUENCE, WIDTH))


def parallelize(stage, dense_mesh, sparse_mesh):
    weight = distribute_tensor(stage.experts.weight, sparse_mesh["ep"], [Shard(0)])
    stage.experts.weight = nn.Parameter(weight)
    fully_shard(stage.experts, mesh=sparse_mesh["efsdp"])
    fully_shard(stage, mesh=dense_mesh["dp"], reshard_after_forward=False)


torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
device = torch.device("cuda", torch.cuda.current_device())
world_mesh = init_device_mesh("cuda", (8,), mesh_dim_names=("world",))
dense_mesh = world_mesh._unflatten(0, (2, 4), ("pp", "dp"))
sparse_mesh = world_mesh._unflatten(0, (2, 2, 2), ("pp", "efsdp", "ep"))
rank, group = dense_mesh["pp"].get_local_rank(), sparse_mesh["ep"].get_group()
mask = make_mask(lambda b, h, q, k: q >= k, None, None, SEQUENCE, SEQUENCE, device="cuda")
parts = [Stage(group, mask).to(device) for _ in range(2)]
for part in parts:
    parallelize(part, dense_mesh, sparse_mesh)
stages = [
    PipelineStage(part, rank + 2 * index, 4, device, group=dense_mesh["pp"].get_group())
    for index, part in enumerate(parts)
]
schedule = ScheduleInterleaved1F1B(
    stages, n_microbatches=2, loss_fn=lambda y, target: (y - target).square().mean()
)
parameters = [parameter for part in parts for parameter in part.parameters()]
optimizer = torch.optim.AdamW(parameters, foreach=False)
for _ in range(10):
    mask = make_mask(lambda b, h, q, k: q >= k, None, None, SEQUENCE, SEQUENCE, device="cuda")
    inputs, target = (torch.randn(2 * SEQUENCE, WIDTH, device=device) for _ in range(2))
    if rank == 0:
        schedule.step(inputs)
    else:
        schedule.step(target=target)
    for owned in ("ep", "dp"):
        nn.utils.clip_grad_norm_(
            [p for p in parameters if owned in p.device_mesh.mesh_dim_names], 1.0
        )
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
