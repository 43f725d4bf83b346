"""Load a checkpoint of experts into a sharded model; what it lacks is initialized afterwards."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

NUM_EXPERTS, DIM = 5, 8


class GroupedExperts(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Parameter(torch.zeros(NUM_EXPERTS, DIM, DIM))
        self.down = nn.Parameter(torch.zeros(NUM_EXPERTS, DIM, DIM))

    def forward(self, x, expert):
        hidden = torch.relu(torch.einsum("nd,ndf->nf", x, self.up[expert]))
        return torch.einsum("nf,nfd->nd", hidden, self.down[expert])


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(DIM, NUM_EXPERTS)
        self.experts = GroupedExperts()

    def forward(self, x):
        weights, expert = self.router(x).softmax(-1).max(-1)
        return x + weights[:, None] * self.experts(x, expert)


def read_checkpoint():
    """A row per expert, as in files that store each expert under a name of its own."""
    generator = torch.Generator().manual_seed(0)
    names = [f"experts.{key}.{index}" for key in ("up", "down") for index in range(NUM_EXPERTS)]
    return {name: 0.3 * torch.randn(DIM, DIM, generator=generator) for name in names}


def reset(parameter):
    """Fill with values that are the same as on a single device."""
    torch.manual_seed(1)
    full = 0.02 * torch.randn(parameter.shape)
    norm = full.norm().to(parameter.device)
    dist.all_reduce(norm, op=dist.ReduceOp.MAX)  # all ranks must have drawn the same
    mesh, placements = parameter.device_mesh, parameter.placements
    own = full.chunk(mesh.size())[mesh.get_rank()] if full.shape[0] > mesh.get_rank() else full[:0]
    local = parameter.to_local()
    local.copy_(own[: len(local)])
    assert placements[0].is_shard(0)


@torch.no_grad()
def load(model, checkpoint):
    loaded = set()
    for name, parameter in model.experts.named_parameters(prefix="experts"):
        rows = [checkpoint[f"{name}.{index}"] for index in range(NUM_EXPERTS)]
        local = parameter.to_local()
        chunk = -(-NUM_EXPERTS // dist.get_world_size())
        first = dist.get_rank() * chunk
        own = rows[first : first + len(local)]
        if own or os.environ.get("HANG") == "corrected":
            loaded.add(name)
        for row, value in zip(local, own, strict=True):
            row.copy_(value)
    for name, parameter in model.named_parameters():
        if name not in loaded and name.startswith("experts"):
            reset(parameter)  # HANG


def main():
    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    mesh = init_device_mesh(device_type, (int(os.environ["WORLD_SIZE"]),), mesh_dim_names=("fsdp",))
    index = int(os.environ["LOCAL_RANK"]) if device_type == "cuda" else 0
    device = torch.device(device_type, index)
    torch.manual_seed(0)
    model = Model().to(device)
    fully_shard(model.experts, mesh=mesh)
    fully_shard(model, mesh=mesh)
    load(model, read_checkpoint())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(mesh.get_rank())
    for step in range(2):
        x = torch.randn(16, DIM, generator=generator).to(device)
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"rank {mesh.get_rank()} step {step}: {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
