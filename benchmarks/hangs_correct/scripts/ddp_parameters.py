"""DDP with parameters that a step does not use, declared in one way or another."""

import argparse

import torch
from common import batches, finish, mlp, setup
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint

MODES = ["find-unused", "static-graph", "frozen", "ignored", "zero-loss"]


class Branches(nn.Module):
    """A trunk and two heads, of which a batch may need one."""

    def __init__(self, mode):
        super().__init__()
        self.mode = mode
        self.trunk, self.left, self.right = mlp(6, 12), mlp(12, 1), mlp(12, 1)
        self.spare = nn.Linear(12, 1)
        if mode == "frozen":
            self.spare.requires_grad_(False)

    def forward(self, x, use_left):
        hidden = self.trunk(x)
        if self.mode == "static-graph":
            hidden = checkpoint(self.trunk, x, use_reentrant=False)
            return self.left(hidden) + self.right(hidden)
        if self.mode == "find-unused":
            return (self.left if use_left else self.right)(hidden)
        out = self.left(hidden) if use_left else self.right(hidden)
        unused = self.right(hidden) if use_left else self.left(hidden)
        spare = self.spare(hidden).sum() if self.mode == "zero-loss" else 0.0
        return out + 0.0 * (unused.sum() + spare)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--mode", choices=MODES, default="find-unused")
    args = parser.parse_args()
    rank, _, device = setup()
    net = Branches(args.mode).to(device)
    if args.mode == "ignored":
        names = [f"spare.{name}" for name, _ in net.spare.named_parameters()]
        DDP._set_params_and_buffers_to_ignore_for_model(net, names)
    model = DDP(
        net,
        find_unused_parameters=args.mode == "find-unused",
        static_graph=args.mode == "static-graph",
    )
    optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.05)
    for step, (x, y) in enumerate(batches(4, rank)):
        out = model(x.to(device), (step + rank) % 2 == 0)
        loss = (out - y.to(device)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    finish("done")


if __name__ == "__main__":
    main()
