"""FSDP2 in several settings, HSDP, FSDP1, and FSDP2 with tensor parallelism."""

import argparse

import torch
from common import TinyLM, finish, lm_loss, setup, token_batches
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

LAYOUTS = ["blocks", "root", "kept", "hsdp", "tp", "fsdp1", "prefetch", "no-sync"]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--layout", choices=LAYOUTS, default="blocks")
    args = parser.parse_args()
    rank, world_size, device = setup()
    net = TinyLM(num_layers=3).to(device)
    shape, names, data_rank = (world_size,), ("dp",), rank
    if args.layout in ("hsdp", "tp"):
        shape, names = (2, world_size // 2), ("replicate", "shard")
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=names)
    keywords = {"mesh": mesh, "reshard_after_forward": args.layout != "kept"}
    if args.layout == "tp":
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        for layer in net.layers:
            parallelize_module(layer, mesh["shard"], plan)
        keywords["mesh"], data_rank = mesh["replicate"], mesh.get_local_rank("replicate")
    if args.layout == "fsdp1":
        policy = ModuleWrapPolicy({type(net.layers[0])})
        model = FullyShardedDataParallel(net, auto_wrap_policy=policy, device_id=device)
    else:
        for layer in net.layers if args.layout != "root" else ():
            fully_shard(layer, **keywords)
        model = fully_shard(net, **keywords)
    if args.layout == "prefetch":
        net.layers[0].set_modules_to_forward_prefetch([net.layers[1]])
        net.layers[2].set_modules_to_backward_prefetch([net.layers[1]])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step, ids in enumerate(token_batches(4, data_rank)):
        if args.layout == "no-sync":
            model.set_requires_gradient_sync(step % 2 == 1)
        lm_loss(model, ids.to(device)).backward()
        if args.layout != "no-sync" or step % 2 == 1:
            if args.layout == "fsdp1":
                model.clip_grad_norm_(1.0)
            elif args.layout != "tp":
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    finish("done")


if __name__ == "__main__":
    main()
