"""Real processes, each one rank of a gloo group."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import final

from warm_python import Program

__all__ = ["TIMEOUT_S", "free_port", "rank_environment", "run_ranks", "start_ranks"]

TIMEOUT_S = 100


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def rank_environment(**more: str) -> dict[str, str]:
    """Of a process that is one of several on this machine, with gloo: they would share a GPU."""
    own = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""}
    return {**os.environ, **own, **more}


def run_ranks(
    num_ranks: int, *program: str | Path, timeout_s: int = TIMEOUT_S, is_fresh: bool = False
) -> list[tuple[int, str]]:
    """Run a program, with its arguments, on real ranks; return how each ended and what it printed.

    Its folder is the current one. Fresh ranks are not forked: each has its own order of sets, so
    that ranks which count on one are found.
    """
    with start_ranks(num_ranks, *program, is_fresh=is_fresh) as ranks:
        ended = [rank.wait(timeout_s=timeout_s) for rank in ranks]
    return [(one.returncode, one.stdout) for one in ended]


@contextmanager
def start_ranks(
    num_ranks: int, *program: str | Path, is_fresh: bool = False
) -> Iterator[list[Program | _Fresh]]:
    """Start a program on real ranks, which are killed when the context ends."""
    start = _Fresh if is_fresh else Program
    port = str(free_port())
    ranks = [
        start(*program, env=_launched(rank, num_ranks, port), is_merged=True)
        for rank in range(num_ranks)
    ]
    try:
        yield ranks
    finally:
        for rank in ranks:
            rank.end()


def _launched(rank: int, num_ranks: int, port: str) -> dict[str, str]:
    """What a launcher tells a rank."""
    return rank_environment(
        RANK=str(rank),
        WORLD_SIZE=str(num_ranks),
        LOCAL_RANK=str(rank),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=port,
    )


@final
class _Fresh:
    """A program in an interpreter of its own, both streams in one."""

    def __init__(self, *arguments: str | Path, env: dict[str, str], is_merged: bool) -> None:
        assert is_merged
        command = [sys.executable, *map(str, arguments)]
        self._process = subprocess.Popen(
            command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait(self, *, timeout_s: float) -> subprocess.CompletedProcess[str]:
        printed, _ = self._process.communicate(timeout=timeout_s)
        return subprocess.CompletedProcess(self._process.args, self._process.returncode, printed)

    def end(self) -> None:
        self._process.kill()
