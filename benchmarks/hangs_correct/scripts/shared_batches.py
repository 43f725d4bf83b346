"""Ranks of a group that must see the same batch, and get it in one way or another."""

import argparse

import torch
import torch.distributed as dist
from common import TinyLM, finish, lm_loss, setup, token_batches
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

WAYS = ["broadcast", "same-seed", "lengths-first", "scattered"]


def first_of_group(group):
    return dist.get_global_rank(group, 0)


def get_batch(way, own, group, device):
    """The batch of the first rank of the group, on all of its ranks."""
    if way == "same-seed":
        return own.to(device)  # the loader is seeded by the data-parallel rank
    source = first_of_group(group)
    is_source = dist.get_rank() == source
    if way == "lengths-first":
        shape = torch.tensor(own.shape, device=device)
        dist.broadcast(shape, src=source, group=group)
        batch = own.to(device) if is_source else torch.empty(*shape.tolist(), dtype=torch.long)
        batch = batch.to(device)
    elif way == "scattered":
        objects = [own if is_source else None]
        dist.broadcast_object_list(objects, src=source, group=group)
        return objects[0].to(device)
    else:
        batch = own.to(device)
    dist.broadcast(batch, src=source, group=group)
    return batch


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--way", choices=WAYS, default="broadcast")
    args = parser.parse_args()
    rank, world_size, device = setup()
    mesh = init_device_mesh(device.type, (world_size // 2, 2), mesh_dim_names=("dp", "tp"))
    net = TinyLM().to(device)
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    for layer in net.layers:
        parallelize_module(layer, mesh["tp"], plan)
    model = fully_shard(net, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    seed = mesh.get_local_rank("dp") if args.way == "same-seed" else rank
    for step, own in enumerate(token_batches(3, seed)):
        if args.way == "lengths-first":
            own = own[:, : 6 + seed + step]
        loss = lm_loss(model, get_batch(args.way, own, mesh.get_group("tp"), device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    finish("done")


if __name__ == "__main__":
    main()
