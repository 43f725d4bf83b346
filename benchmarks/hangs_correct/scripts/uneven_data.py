"""Ranks whose shards have different numbers of samples, and ways to end the epoch together."""

import argparse
import contextlib
import itertools

import torch
import torch.distributed as dist
from common import any_rank, finish, mlp, setup, stream
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP

ENDINGS = ["join", "join-zero", "flag", "shortest", "cycle", "substitute"]


def until_any_ends(iterator, device):
    """Batches until the data of any rank ends."""
    while True:
        batch = next(iterator, None)
        if any_rank(batch is None, device):
            return
        yield batch


def until_all_end(iterator, device):
    """Batches until the data of every rank has ended; empty ones with weight zero after its own."""
    last = None
    while True:
        batch = next(iterator, None)
        flag = torch.tensor(int(batch is not None), device=device)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        if not flag:
            return
        last = batch or last
        yield (*last, 1.0 if batch is not None else 0.0)


def agreed_length(num_batches, device):
    """The smallest number of batches of any rank."""
    value = torch.tensor(num_batches, device=device)
    dist.all_reduce(value, op=dist.ReduceOp.MIN)
    return int(value)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--ending", choices=ENDINGS, default="join")
    args = parser.parse_args()
    rank, _, device = setup()
    model = DDP(mlp(6, 12, 1).to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    joined = [model]
    if args.ending == "join-zero":
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)
        joined.append(optimizer)
    num_own = 3 + 2 * rank
    for _ in range(2):
        data = stream(num_own, rank)
        if args.ending == "flag":
            data = until_any_ends(data, device)
        elif args.ending == "shortest":
            data = list(data)
            data = data[: agreed_length(len(data), device)]
        elif args.ending == "cycle":
            data = itertools.islice(itertools.cycle(data), 5)
        elif args.ending == "substitute":
            data = until_all_end(data, device)
        is_joined = args.ending.startswith("join")
        with Join(joined) if is_joined else contextlib.nullcontext():
            for x, y, *weight in data:
                errors = (model(x.to(device)) - y.to(device)).square().mean()
                loss = errors * (weight[0] if weight else 1.0)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
    finish("done")


if __name__ == "__main__":
    main()
