"""Ends, or starts its ranks, in a way that depends on the rank."""

import ctypes
import os
import subprocess
import sys
import threading

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn


class Training:
    def __init__(self, rank: int = -1, size: int = -1) -> None:
        dist.init_process_group("nccl", rank=rank, world_size=size)
        self.model = nn.parallel.DistributedDataParallel(nn.Linear(8, 8).cuda())
        self.optimizer = torch.optim.SGD(self.model.parameters())

    def step(self) -> torch.Tensor:
        output = self.model(torch.randn(2, 8).cuda())
        output.sum().backward()
        self.optimizer.step()
        return output

    def run(self) -> None:
        while True:
            self.step()


def raise_in_second_step() -> None:
    training = Training()
    training.step()
    training.model(torch.randn(2, 8).cuda())
    raise ValueError("no more data")


def exit_after_a_step() -> None:
    Training().step()
    sys.exit(5)


def exit_at_once() -> None:
    Training().step()
    os._exit(7)


def crash() -> None:
    Training().step()
    ctypes.string_at(0)


def kill() -> None:
    Training().step()
    os.kill(os.getpid(), 9)


def catch_everything() -> None:
    training = Training()
    while True:
        try:
            training.step()
        except BaseException:  # noqa: BLE001
            continue


def replace_exception() -> None:
    training = Training()
    try:
        training.run()
    except BaseException as error:
        raise RuntimeError("training failed") from error


def update_without_optimizer() -> None:
    dist.init_process_group("nccl")
    model = nn.parallel.DistributedDataParallel(nn.Linear(8, 8).cuda())
    while True:
        model(torch.randn(2, 8).cuda()).sum().backward()
        for parameter in model.parameters():
            parameter.data -= 0.1 * parameter.grad


def train_in_thread() -> None:
    thread = threading.Thread(target=Training().run)
    thread.start()
    thread.join()


def fail_in_thread() -> None:
    thread = threading.Thread(target=lambda: 1 // 0)
    thread.start()
    thread.join()


def evaluate() -> None:
    with torch.no_grad():
        Training().model(torch.randn(2, 8).cuda())


def start_another_program() -> None:
    subprocess.run([sys.executable, "-c", "pass"], check=True)


def select_by_value() -> None:
    output = Training().step()
    torch.repeat_interleave(output, output.long().sum(1), dim=0)


def fork() -> None:
    training = Training()
    training.step()
    if os.fork() == 0:
        raise ValueError("not the rank's own process")
    os.wait()
    training.run()


def leave_a_daemon() -> None:
    subprocess.Popen(["sleep", os.environ["LIFECYCLE_SLEEP"]], start_new_session=True)
    Training().run()


def train_as(rank: int, size: int) -> None:
    Training(rank, size).run()


def start_ranks() -> None:
    size = dist.get_node_local_rank() + 1
    context = mp.get_context("spawn")
    processes = [context.Process(target=train_as, args=(rank, size)) for rank in range(size)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()


ACTIONS = (
    raise_in_second_step, exit_after_a_step, exit_at_once, crash, kill, catch_everything,
    replace_exception, update_without_optimizer, train_in_thread, fail_in_thread, evaluate,
    start_another_program, select_by_value, fork, leave_a_daemon, start_ranks,
)  # fmt: skip

if __name__ == "__main__":
    ACTIONS[int(os.environ["RANK"])]()
