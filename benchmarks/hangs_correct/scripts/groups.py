"""Process groups created on every rank, and used by their members only."""

import argparse

import torch
import torch.distributed as dist
from common import batches, finish, mlp, setup
from torch.distributed.device_mesh import init_device_mesh

WAYS = ["mesh", "all-create-all", "subgroups", "students", "local", "monitor"]


def create(way, rank, world_size, device):
    """The group of this rank's half of the world."""
    half = world_size // 2
    halves = [list(range(half)), list(range(half, world_size))]
    if way == "mesh":
        mesh = init_device_mesh(device.type, (2, half), mesh_dim_names=("outer", "inner"))
        return mesh.get_group("inner")
    if way == "subgroups":
        return dist.new_subgroups_by_enumeration(halves)[0]
    if way == "local":
        own = halves[0] if rank < half else halves[1]
        return dist.new_group(own, use_local_synchronization=True)
    groups = [dist.new_group(ranks) for ranks in halves]
    return groups[0] if rank < half else groups[1]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--way", choices=WAYS, default="mesh")
    args = parser.parse_args()
    rank, world_size, device = setup()
    group = create(args.way, rank, world_size, device)
    everyone = dist.new_group(list(range(world_size)))
    net = mlp(6, 12, 1).to(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    for x, y in batches(3, rank):
        if args.way == "students" and rank >= world_size // 2:
            continue  # the other half does not train, and joins at the end
        loss = (net(x.to(device)) - y.to(device)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        for p in net.parameters():
            dist.all_reduce(p.grad, group=group)
        optimizer.step()
    if args.way == "monitor":
        dist.barrier(group=everyone)
    total = sum(p.detach().sum() for p in net.parameters())
    dist.all_reduce(total, group=everyone)
    finish(f"sum of all parameters {total.item():.3f}")


if __name__ == "__main__":
    main()
