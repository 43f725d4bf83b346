"""Handlers of signals that only set a flag, which the ranks agree on at the end of a step."""

import argparse
import os
import signal

import torch
from common import any_rank, batches, finish, mlp, setup
from torch.nn.parallel import DistributedDataParallel as DDP

received = set()


def handle(number, frame):
    """Remember the signal; the step that is running goes on."""
    received.add(number)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--signal", default="SIGTERM")
    parser.add_argument("--from-self", action="store_true", help="rank 1 sends it to itself")
    args = parser.parse_args()
    number = getattr(signal, args.signal)
    signal.signal(number, handle)
    rank, _, device = setup()
    net = mlp(6, 12, 1).to(device)
    model = DDP(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    num_steps = 0
    for num_steps, (x, y) in enumerate(batches(6, rank), 1):
        loss = (model(x.to(device)) - y.to(device)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if args.from_self and rank == 1 and num_steps == 3:
            os.kill(os.getpid(), number)
        if any_rank(number in received, device):
            break
    finish(f"left after {num_steps} steps")


if __name__ == "__main__":
    main()
