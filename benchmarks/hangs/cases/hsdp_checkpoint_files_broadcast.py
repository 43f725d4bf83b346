"""Resume an HSDP run: the first replica reads its shards and sends them to the other replicas."""

import os
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

CORRECTED = os.environ.get("HANG") == "corrected"


def build(mesh, device):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)).to(device)
    fully_shard(model[0], mesh=mesh)
    fully_shard(model[2], mesh=mesh)
    return fully_shard(model, mesh=mesh)


def save_shards(model, mesh, folder):
    if mesh.get_local_rank("replicate") == 0:
        shard = {name: p.to_local().cpu() for name, p in model.state_dict().items()}
        torch.save(shard, os.path.join(folder, f"shard-{mesh.get_local_rank('shard')}.pt"))
    dist.barrier()


def load_shards(model, mesh, folder):
    """Ranks of the first replica read; the first rank of each node receives for the others."""
    group = mesh.get_group("replicate")
    source = dist.get_global_rank(group, 0)
    is_reader = mesh.get_local_rank("replicate") == 0
    is_first_of_node = int(os.environ["LOCAL_RANK"]) == 0
    state = [None]
    if is_reader:
        state = [torch.load(os.path.join(folder, f"shard-{mesh.get_local_rank('shard')}.pt"))]
    if CORRECTED or is_reader or is_first_of_node:  # HANG
        dist.broadcast_object_list(state, src=source, group=group)
    dist.barrier()
    if state[0] is not None:
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.to_local().copy_(state[0][name])


def train(model, mesh, device, num_steps):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(num_steps):
        x = torch.randn(4, 8, generator=generator).to(device)
        loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


def main():
    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    world_size = int(os.environ["WORLD_SIZE"])
    names = ("replicate", "shard")
    mesh = init_device_mesh(device_type, (world_size // 2, 2), mesh_dim_names=names)
    device = torch.device(
        device_type, int(os.environ["LOCAL_RANK"]) if device_type == "cuda" else 0
    )
    folders = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folders, src=0)

    model = build(mesh, device)
    train(model, mesh, device, 2)
    save_shards(model, mesh, folders[0])
    resumed = build(mesh, device)
    load_shards(resumed, mesh, folders[0])
    print(f"rank {dist.get_rank()}: resumed with loss {train(resumed, mesh, device, 2):.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
