"""torch.compile under DDP, FSDP2, tensor parallelism and with functional collectives."""

import argparse

import torch
import torch.distributed._functional_collectives as funcol
from common import TinyLM, finish, lm_loss, setup, token_batches
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel as DDP

WRAPPERS = ["ddp", "fsdp", "tp", "loss"]


def mean_loss(loss):
    return funcol.all_reduce(loss, "sum", dist.group.WORLD) / dist.get_world_size()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--wrapper", choices=WRAPPERS, default="ddp")
    parser.add_argument("--lengths", choices=["static", "per-rank"], default="static")
    args = parser.parse_args()
    rank, world_size, device = setup()
    net = TinyLM().to(device)
    backend = "inductor" if device.type == "cuda" else "aot_eager"
    if args.wrapper == "ddp":
        model = torch.compile(DDP(net), backend=backend)
    elif args.wrapper == "fsdp":
        for layer in net.layers:
            layer.compile(backend=backend)
            fully_shard(layer)
        model = fully_shard(net)
    elif args.wrapper == "tp":
        mesh = init_device_mesh(device.type, (world_size,))
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        for layer in net.layers:
            parallelize_module(layer, mesh, plan)
            layer.compile(backend=backend)
        model = net
    else:
        model = torch.compile(net, backend=backend)
    mean = torch.compile(mean_loss, backend=backend)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    data_rank = 0 if args.wrapper == "tp" else rank
    for step, ids in enumerate(token_batches(3, data_rank)):
        if args.lengths == "per-rank":
            ids = ids[:, : 10 - rank - step]
        loss = lm_loss(model, ids.to(device))
        optimizer.zero_grad()
        loss.backward()
        if args.wrapper == "loss":
            for p in net.parameters():
                dist.all_reduce(p.grad)
            mean(loss.detach())
        optimizer.step()
    finish("done")


if __name__ == "__main__":
    main()
