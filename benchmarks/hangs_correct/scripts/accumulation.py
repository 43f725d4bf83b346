"""Gradient accumulation with the same boundary on every rank."""

import argparse
import contextlib

import torch
import torch.distributed as dist
from common import TinyLM, any_rank, finish, lm_loss, setup, token_batches
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

WAYS = ["no-sync", "fsdp", "tokens", "last-batch", "buckets"]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--way", choices=WAYS, default="no-sync")
    args = parser.parse_args()
    rank, _, device = setup()
    net = TinyLM().to(device)
    if args.way == "fsdp":
        for layer in net.layers:
            fully_shard(layer)
        model = fully_shard(net)
    else:
        model = DDP(net, bucket_cap_mb=1 if args.way == "buckets" else 25)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    num_tokens, data = 0, list(token_batches(5, rank))
    for step, ids in enumerate(data):
        if args.way == "tokens":
            ids = ids[:, : 6 + rank]
        num_tokens += ids.numel()
        is_last = step == len(data) - 1
        is_boundary = step % 2 == 1 or is_last
        if args.way == "tokens":  # enough tokens on any rank, which all ranks know before backward
            is_boundary = any_rank(num_tokens >= 30, device) or is_last
        if args.way == "fsdp":
            model.set_requires_gradient_sync(is_boundary)
        waits = args.way != "fsdp" and not is_boundary
        with model.no_sync() if waits else contextlib.nullcontext():
            lm_loss(model, ids.to(device)).backward()
        if is_boundary:
            optimizer.step()
            optimizer.zero_grad()
            num_tokens = 0
    dist.barrier()
    finish("done")


if __name__ == "__main__":
    main()
