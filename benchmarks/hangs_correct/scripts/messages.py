"""Point-to-point messages in patterns that cannot block each other."""

import argparse

import torch
import torch.distributed as dist
from common import finish, mlp, setup

PATTERNS = ["ring-batched", "ring-isend", "even-odd", "tree", "any-source", "parameter-server"]


def ring_batched(x, rank, size):
    received = torch.empty_like(x)
    ops = [
        dist.P2POp(dist.isend, x, (rank + 1) % size),
        dist.P2POp(dist.irecv, received, (rank - 1) % size),
    ]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return received


def ring_isend(x, rank, size):
    received = torch.empty_like(x)
    work = dist.isend(x, (rank + 1) % size)
    dist.recv(received, (rank - 1) % size)
    work.wait()
    return received


def even_odd(x, rank, size):
    received = torch.empty_like(x)
    if rank % 2 == 0:
        dist.send(x, (rank + 1) % size)
        dist.recv(received, (rank - 1) % size)
    else:
        dist.recv(received, (rank - 1) % size)
        dist.send(x, (rank + 1) % size)
    return received


def tree(x, rank, size):
    """Sum to rank 0 along a binary tree, and back with a broadcast."""
    total, distance = x.clone(), 1
    while distance < size:
        if rank % (2 * distance) == 0 and rank + distance < size:
            part = torch.empty_like(total)
            dist.recv(part, rank + distance)
            total += part
        elif rank % (2 * distance) == distance:
            dist.send(total, rank - distance)
            break
        distance *= 2
    dist.broadcast(total, src=0)
    return total


def any_source(x, rank, size):
    """Rank 0 takes what comes first."""
    if rank == 0:
        total, part = x.clone(), torch.empty_like(x)
        for _ in range(size - 1):
            dist.recv(part)
            total += part
    else:
        dist.send(x, 0)
        total = x.clone()
    dist.broadcast(total, src=0)
    return total


def parameter_server(x, rank, size):
    """Rank 0 serves the others in turn."""
    answer = torch.empty_like(x)
    if rank == 0:
        for worker in range(1, size):
            dist.recv(answer, worker)
            dist.send(answer + x, worker)
        return x
    dist.send(x, 0)
    dist.recv(answer, 0)
    return answer


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--pattern", choices=PATTERNS, default="ring-batched")
    args = parser.parse_args()
    rank, size, device = setup()
    exchange = globals()[args.pattern.replace("-", "_")]
    net = mlp(4, 8, 4).to(device)
    x = torch.full((2, 4), float(rank), device=device)
    for _ in range(3):
        with torch.no_grad():
            x = exchange(net(x).contiguous(), rank, size)
    dist.barrier()
    finish(f"{x.sum().item():.3f}")


if __name__ == "__main__":
    main()
