"""Functions that tests run in workers."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch

from captured_fragments import run
from shardscope.compile.diagnose.subgraph.subgraph import Subgraph
from shardscope.compile.diagnose.worker.server import WorkerContext

__all__: list[str] = []


def add(context: WorkerContext, left: Any, right: Any) -> Any:
    return left + right


def count(context: WorkerContext) -> int:
    context.store["count"] = context.store.get("count", 0) + 1
    return int(context.store["count"])


def pid(context: WorkerContext) -> int:
    return os.getpid()


def keep(context: WorkerContext, name: str, value: Any) -> None:
    context.store[name] = value
    context.store["times"] = context.store.get("times", 0) + 1


def held(context: WorkerContext, name: str) -> Any:
    return context.store.get(name)


def print_much(context: WorkerContext, text: str) -> None:
    print(text)
    print("x" * 200_000, file=sys.stderr)
    os.system("echo from a child")


class OddError(Exception):
    def __init__(self, a: int, b: int) -> None:
        super().__init__(f"{a} is not {b}")
        self.a, self.b = a, b

    def __reduce__(self) -> Any:
        raise TypeError("not me")


def fail(context: WorkerContext, kind: str) -> None:
    if kind == "odd":
        raise OddError(1, 2)
    if kind == "exit":
        sys.exit(4)
    raise ValueError("the cat is on the mat")


def return_a_lock(context: WorkerContext) -> Any:
    return threading.Lock()


def read_address_zero(context: WorkerContext) -> None:
    context.report_phase("compiling")
    ctypes.string_at(0)


def exit_with_three(context: WorkerContext) -> None:
    print("goodbye", flush=True)
    os._exit(3)


def sleep_with_the_lock(context: WorkerContext) -> None:
    """In C, where no other thread of Python's can run."""
    ctypes.PyDLL(None).sleep(100)


def stop_reading_requests(context: WorkerContext, delay_s: float) -> None:
    """After this call, keep the interpreter lock in a thread: no thread of Python's can run."""
    timer = threading.Timer(delay_s, sleep_with_the_lock, args=(context,))
    timer.daemon = True
    timer.start()


def begin_a_child_and_sleep_with_the_lock(context: WorkerContext, file: str) -> None:
    child = subprocess.Popen(["sleep", "100"])
    Path(file).write_text(str(child.pid))
    context.report_phase("compiling")
    time.sleep(0.01)
    context.report_phase("running")
    sleep_with_the_lock(context)


def interrupt(context: WorkerContext, pid: int) -> None:
    os.kill(pid, signal.SIGINT)
    time.sleep(100)


def compute(context: WorkerContext, subgraph: Subgraph) -> Any:
    return run(subgraph)


def describe_places(context: WorkerContext) -> dict[str, Any]:
    import tempfile

    return {
        "cwd": os.getcwd(),
        "tmp": tempfile.gettempdir(),
        "threads": torch.get_num_threads(),
        "environment": dict(os.environ),
        "session": os.getsid(0),
    }


def compile_with_inductor(context: WorkerContext) -> torch.Tensor:
    return torch.compile(lambda x: torch.relu(x) + 1)(torch.linspace(-1, 1, 8))


def look_at(context: WorkerContext, tensors: tuple[torch.Tensor, ...]) -> list[Any]:
    return [
        (
            tensor.dtype,
            tuple(tensor.shape),
            tensor.stride(),
            tensor.storage_offset(),
            tensor.requires_grad,
        )
        for tensor in tensors
    ]


def write_through(
    context: WorkerContext, tensors: tuple[torch.Tensor, ...]
) -> tuple[torch.Tensor, ...]:
    with torch.no_grad():
        tensors[0].fill_(7)
    return tensors
