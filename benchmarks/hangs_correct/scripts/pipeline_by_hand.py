"""GPipe and 1F1B by hand, with different ways to send activations and gradients."""

import argparse

import torch
import torch.distributed as dist
from common import finish, setup
from torch import nn

DIM = 6


class Neighbours:
    """Sends to and receives from the stages before and after this one."""

    def __init__(self, messages, rank, size):
        self.messages, self.rank, self.size, self.pending = messages, rank, size, []

    def send(self, tensor, to):
        if not 0 <= to < self.size:
            return
        if self.messages == "blocking":
            dist.send(tensor.contiguous(), to)
        elif self.messages == "isend":
            kept = tensor.contiguous()
            self.pending.append((dist.isend(kept, to), kept))
        else:
            kept = tensor.contiguous()
            ops = [dist.P2POp(dist.isend, kept, to)]
            self.pending += [(work, kept) for work in dist.batch_isend_irecv(ops)]

    def receive(self, like, source):
        tensor = torch.empty_like(like)
        dist.recv(tensor, source)
        return tensor

    def flush(self):
        for work, _ in self.pending:
            work.wait()
        self.pending.clear()


def forward(module, x, links):
    if links.rank > 0:
        x = links.receive(x, links.rank - 1).requires_grad_()
    out = module(x)
    links.send(out.detach(), links.rank + 1)
    return x, out


def backward(x, out, links):
    if links.rank == links.size - 1:
        out.square().mean().backward()
    else:
        out.backward(links.receive(out, links.rank + 1))
    if links.rank > 0:
        links.send(x.grad, links.rank - 1)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--schedule", choices=["gpipe", "1f1b"], default="1f1b")
    parser.add_argument("--messages", choices=["blocking", "isend", "batched"], default="isend")
    parser.add_argument("--micro-batches", type=int, default=4)
    args = parser.parse_args()
    rank, size, device = setup()
    module = nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh()).to(device)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    links = Neighbours(args.messages, rank, size)
    generator = torch.Generator().manual_seed(0)
    for _ in range(2):
        micro_batches = list(
            torch.randn(args.micro_batches, 2, DIM, generator=generator).to(device)
        )
        warmup = args.micro_batches
        if args.schedule == "1f1b":
            warmup = min(size - rank - 1, args.micro_batches)
        states = [forward(module, x, links) for x in micro_batches[:warmup]]
        for x in micro_batches[warmup:]:
            states.append(forward(module, x, links))
            backward(*states.pop(0), links)
        while states:
            backward(*states.pop(0), links)
        links.flush()
        optimizer.step()
        optimizer.zero_grad()
    finish("done")


if __name__ == "__main__":
    main()
