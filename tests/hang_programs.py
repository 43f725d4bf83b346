"""Programs in which real ranks hang: `python hang_programs.py FOLDER NAME`, as one rank each."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable

import torch.distributed as dist
from torch import ones

from shardscope import phases, trace

HANG_S = 1_000
NUM_BEFORE = 3_000
STREAM_BYTES = 64 * 1024


def load_for_ever() -> None:
    """Rank 1 stays in its data loader; the others go on to the next collective."""
    dist.all_reduce(ones(4))
    if dist.get_rank() == 1:
        with phases("load"):
            time.sleep(HANG_S)
    dist.all_reduce(ones(4))


def receive_first() -> None:
    """Both ranks receive before they send."""
    dist.all_reduce(ones(4))
    peer = 1 - dist.get_rank()
    dist.recv(ones(4), peer)
    dist.send(ones(4), peer)


def receive_from_anyone() -> None:
    """Rank 0 receives from any rank; the other is in a collective that needs rank 0."""
    dist.all_reduce(ones(4))
    if dist.get_rank() == 0:
        dist.recv(ones(4))
    dist.all_reduce(ones(4))


def tag_differently() -> None:
    """Rank 1 receives a message with another tag than that of the one rank 0 sends."""
    dist.all_reduce(ones(4))
    if dist.get_rank() == 0:
        dist.send(ones(4), 1, tag=1)
    else:
        dist.recv(ones(4), 0, tag=2)


def train(harm: Callable[[int], None]) -> None:
    """Steps of two collectives; rank 1 is harmed before each."""
    for step in range(12):
        if dist.get_rank() == 1:
            harm(step)
        dist.all_reduce(ones(4))
        dist.broadcast(ones(8), 0)


def kill_a_rank() -> None:
    """Rank 1 is killed in its last step, as by the kernel when its host has no memory left."""
    train(lambda step: os.kill(os.getpid(), signal.SIGKILL) if step == 11 else None)


def stop_a_rank() -> None:
    """Rank 1 is stopped in its last step."""
    train(lambda step: os.kill(os.getpid(), signal.SIGSTOP) if step == 11 else None)


def slow_a_rank() -> None:
    """Rank 1 takes longer than the others before each step; nothing hangs."""
    train(lambda step: time.sleep(0.1))


def order_groups_differently() -> None:
    """Two groups of the same ranks, used in opposite order."""
    groups = [dist.new_group([0, 1]), dist.new_group([0, 1])]
    for group in groups if dist.get_rank() == 0 else reversed(groups):
        dist.all_reduce(ones(4), group=group)


def raise_on_a_rank() -> None:
    """Rank 1 raises; what the other waits for never comes."""
    dist.all_reduce(ones(4))
    if dist.get_rank() == 1:
        raise ValueError("the batch is empty")
    dist.all_reduce(ones(4))


def load_after_many() -> None:
    """Rank 1 stays in its data loader, when the first collectives are no longer in the streams."""
    for _ in range(NUM_BEFORE):
        dist.all_reduce(ones(4))
    load_for_ever()


def receive_after_many() -> None:
    """Both ranks receive, when the first transfers are no longer in the streams."""
    for number in range(NUM_BEFORE):
        if dist.get_rank() == number % 2:
            dist.send(ones(4), 1 - dist.get_rank())
        else:
            dist.recv(ones(4), 1 - dist.get_rank())
    receive_first()


def main() -> None:
    folder, name = sys.argv[1:]
    dist.init_process_group("gloo")
    stream_bytes = STREAM_BYTES if name.endswith("after_many") else None
    with trace(stream=f"{folder}/run-{{rank}}.jsonl", stream_bytes=stream_bytes):
        globals()[name]()


if __name__ == "__main__":
    main()
