"""Early stopping that every rank obeys."""

import argparse

import torch
import torch.distributed as dist
from common import any_rank, batches, finish, mlp, setup
from torch.nn.parallel import DistributedDataParallel as DDP

RULES = ["rank-zero", "any-rank", "all-ranks", "mean-loss", "object", "same-loss"]


def own_decision(losses, patience=1):
    """Whether the last losses are no better than those before."""
    return len(losses) > patience and min(losses[-patience:]) >= min(losses[:-patience])


def decide(rule, losses, device):
    if rule == "same-loss":
        return own_decision(losses)  # of a validation set that all ranks have
    is_over = own_decision(losses)
    if rule == "any-rank":
        return any_rank(is_over, device)
    if rule == "object":
        decisions = [None] * dist.get_world_size()
        dist.all_gather_object(decisions, is_over)
        return all(decisions)
    flag = torch.tensor(int(is_over), device=device)
    if rule == "rank-zero":
        dist.broadcast(flag, src=0)
    else:
        dist.all_reduce(flag, op=dist.ReduceOp.MIN)
    return bool(flag)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rule", choices=RULES, default="rank-zero")
    args = parser.parse_args()
    rank, world_size, device = setup()
    net = mlp(6, 12, 1).to(device)
    model = DDP(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.4)
    val_rank = 0 if args.rule == "same-loss" else rank
    losses = []
    for _ in range(8):
        for x, y in batches(2, rank):
            loss = (model(x.to(device)) - y.to(device)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        with torch.no_grad():
            x, y = next(batches(1, val_rank, offset=1000))
            loss = (net(x.to(device)) - y.to(device)).square().mean()
        if args.rule == "mean-loss":
            dist.all_reduce(loss)
            loss /= world_size
        losses.append(loss.item())
        if decide(args.rule, losses, device):
            break
    dist.barrier()
    finish(f"stopped after {len(losses)} epochs")


if __name__ == "__main__":
    main()
