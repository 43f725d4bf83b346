"""Steps that are skipped for a loss or gradient that is not finite, decided in common."""

import argparse

import torch
import torch.distributed as dist
from common import any_rank, batches, finish, mlp, setup
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

DECISIONS = ["loss-flag", "reduced-loss", "gradient-norm", "fsdp-norm", "scaler", "zeroed-loss"]


def should_skip(decision, loss, device):
    """Before backward: whether any rank has a bad loss."""
    if decision == "loss-flag":
        return any_rank(not torch.isfinite(loss), device)
    if decision == "reduced-loss":
        total = loss.detach().clone()
        dist.all_reduce(total)
        return not torch.isfinite(total)
    return False


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--decision", choices=DECISIONS, default="loss-flag")
    args = parser.parse_args()
    rank, _, device = setup()
    net = mlp(6, 12, 1).to(device)
    if args.decision == "fsdp-norm":
        for layer in (net[0], net[2]):
            fully_shard(layer)
        model = fully_shard(net)
    else:
        model = DDP(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler(device.type, enabled=args.decision == "scaler", init_scale=8.0)
    num_skipped = 0
    for step, (x, y) in enumerate(batches(4, rank)):
        if step == 1 and rank == 1:
            x[0, 0] = float("nan")
        loss = (model(x.to(device)) - y.to(device)).square().mean()
        if args.decision == "zeroed-loss":
            loss = torch.nan_to_num(loss, nan=0.0)
        if should_skip(args.decision, loss, device):
            num_skipped += 1
            continue
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        if args.decision in ("gradient-norm", "fsdp-norm") and not torch.isfinite(norm):
            num_skipped += 1  # the norm is that of averaged gradients, the same on every rank
            optimizer.zero_grad()
            continue
        scaler.step(optimizer)
        scaler.update()
    counts = torch.tensor(num_skipped, device=device)
    dist.all_reduce(counts)
    finish(f"skipped {counts.item()}")


if __name__ == "__main__":
    main()
