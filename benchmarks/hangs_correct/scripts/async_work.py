"""Asynchronous collectives, issued in the same order on every rank and waited for in any."""

import argparse

import torch
import torch.distributed as dist
from common import batches, finish, mlp, setup

ORDERS = ["issued", "reversed", "hooks", "coalesced", "two-groups", "overlapped"]


def reduce_all(order, gradients, groups):
    works = []
    if order == "coalesced":
        flat = torch.cat([g.flatten() for g in gradients])
        dist.all_reduce(flat)
        for g, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
            g.copy_(part.view_as(g))
        return
    for index, gradient in enumerate(gradients):
        group = groups[index % 2] if order == "two-groups" else None
        works.append(dist.all_reduce(gradient, group=group, async_op=True))
    for work in reversed(works) if order == "reversed" else works:
        work.wait()


class Hooks:
    """Reduces each gradient when it is ready; backward has one order on all ranks."""

    def __init__(self, net):
        self.works = []
        for p in net.parameters():
            p.register_post_accumulate_grad_hook(self.reduce)

    def reduce(self, p):
        self.works.append(dist.all_reduce(p.grad, async_op=True))

    def wait(self):
        for work in self.works:
            work.wait()
        self.works.clear()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--order", choices=ORDERS, default="issued")
    args = parser.parse_args()
    rank, world_size, device = setup()
    groups = [dist.new_group(), dist.new_group()]
    net = mlp(6, 12, 12, 1).to(device)
    hooks = Hooks(net) if args.order == "hooks" else None
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05 / world_size)
    pending = None
    for x, y in batches(4, rank):
        loss = (net(x.to(device)) - y.to(device)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        if hooks is not None:
            hooks.wait()
        else:
            reduce_all(args.order, [p.grad for p in net.parameters()], groups)
        optimizer.step()
        if args.order == "overlapped":  # the loss of a step is reduced while the next one runs
            if pending is not None:
                pending[0].wait()
            total = loss.detach().clone()
            pending = dist.all_reduce(total, async_op=True), total
    if pending is not None:
        pending[0].wait()
    finish("done")


if __name__ == "__main__":
    main()
