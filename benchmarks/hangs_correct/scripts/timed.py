"""What depends on the clock, decided by rank 0 or agreed on."""

import argparse
import time

import torch
import torch.distributed as dist
from common import any_rank, batches, finish, mlp, setup
from torch.distributed.fsdp import fully_shard

TASKS = ["save", "stop", "evaluate", "log"]


class Timer:
    """Says that an interval has passed, on all ranks or on none."""

    def __init__(self, seconds, device, *, by_rank_zero):
        self.seconds, self.device, self.by_rank_zero = seconds, device, by_rank_zero
        self.start = time.monotonic()

    def is_due(self):
        is_due = time.monotonic() - self.start >= self.seconds
        if self.by_rank_zero:
            flag = torch.tensor(int(is_due), device=self.device)
            dist.broadcast(flag, src=0)
            is_due = bool(flag)
        else:
            is_due = any_rank(is_due, self.device)
        if is_due:
            self.start = time.monotonic()
        return is_due


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--task", choices=TASKS, default="save")
    parser.add_argument("--seconds", type=float, default=0.02)
    args = parser.parse_args()
    rank, _, device = setup()
    model = fully_shard(mlp(6, 12, 1).to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    timer = Timer(args.seconds, device, by_rank_zero=args.task != "stop")
    last_log = time.monotonic()
    for step, (x, y) in enumerate(batches(12, rank)):
        loss = (model(x.to(device)) - y.to(device)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if args.task == "log":
            if time.monotonic() - last_log > args.seconds:  # local, and without a collective
                print(f"rank {rank} step {step}: {loss.item():.4f}")
                last_log = time.monotonic()
        elif timer.is_due():
            if args.task == "stop":
                break
            if args.task == "save":
                state = {name: p.full_tensor() for name, p in model.state_dict().items()}
                if rank == 0:
                    time.sleep(0.01 * len(state))
            else:
                with torch.no_grad():
                    model(torch.ones(2, 6, device=device))
    finish("done")


if __name__ == "__main__":
    main()
