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
from shardscope.compile.diagnose.fragment import Fragment
from shardscope.compile.diagnose.isolation.bench import Bench

__all__: list[str] = []


def add(bench: Bench, left: Any, right: Any) -> Any:
    return left + right


def count(bench: Bench) -> int:
    bench.held["count"] = bench.held.get("count", 0) + 1
    return int(bench.held["count"])


def pid(bench: Bench) -> int:
    return os.getpid()


def keep(bench: Bench, name: str, value: Any) -> None:
    bench.held[name] = value
    bench.held["times"] = bench.held.get("times", 0) + 1


def held(bench: Bench, name: str) -> Any:
    return bench.held.get(name)


def print_much(bench: Bench, text: str) -> None:
    print(text)
    print("x" * 200_000, file=sys.stderr)
    os.system("echo from a child")


class OddError(Exception):
    def __init__(self, a: int, b: int) -> None:
        super().__init__(f"{a} is not {b}")
        self.a, self.b = a, b

    def __reduce__(self) -> Any:
        raise TypeError("not me")


def fail(bench: Bench, kind: str) -> None:
    if kind == "odd":
        raise OddError(1, 2)
    if kind == "exit":
        sys.exit(4)
    raise ValueError("the cat is on the mat")


def return_a_lock(bench: Bench) -> Any:
    return threading.Lock()


def read_address_zero(bench: Bench) -> None:
    bench.announce("compiling")
    ctypes.string_at(0)


def exit_with_three(bench: Bench) -> None:
    print("goodbye", flush=True)
    os._exit(3)


def sleep_with_the_lock(bench: Bench) -> None:
    """In C, where no other thread of Python's can run."""
    ctypes.PyDLL(None).sleep(100)


def begin_a_child_and_sleep_with_the_lock(bench: Bench, file: str) -> None:
    child = subprocess.Popen(["sleep", "100"])
    Path(file).write_text(str(child.pid))
    bench.announce("compiling")
    time.sleep(0.01)
    bench.announce("running")
    sleep_with_the_lock(bench)


def interrupt(bench: Bench, pid: int) -> None:
    os.kill(pid, signal.SIGINT)
    time.sleep(100)


def compute(bench: Bench, fragment: Fragment) -> Any:
    return run(fragment)


def describe_places(bench: Bench) -> dict[str, Any]:
    import tempfile

    return {
        "cwd": os.getcwd(),
        "tmp": tempfile.gettempdir(),
        "threads": torch.get_num_threads(),
        "environment": dict(os.environ),
        "session": os.getsid(0),
    }


def compile_with_inductor(bench: Bench) -> torch.Tensor:
    return torch.compile(lambda x: torch.relu(x) + 1)(torch.linspace(-1, 1, 8))


def look_at(bench: Bench, tensors: tuple[torch.Tensor, ...]) -> list[Any]:
    return [
        (one.dtype, tuple(one.shape), one.stride(), one.storage_offset(), one.requires_grad)
        for one in tensors
    ]


def write_through(bench: Bench, tensors: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    with torch.no_grad():
        tensors[0].fill_(7)
    return tensors
