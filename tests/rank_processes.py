"""Real processes, each one rank of a gloo group."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

__all__ = ["TIMEOUT_S", "free_port", "rank_environment", "run_ranks"]

TIMEOUT_S = 100


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def rank_environment(**more: str) -> dict[str, str]:
    """Of a process that is one of several on this machine."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **more}


def run_ranks(
    num_ranks: int, program: Path, *arguments: str, timeout_s: int = TIMEOUT_S
) -> list[tuple[int, str]]:
    """Run a program on real ranks and return how each ended and what it printed."""
    port = str(free_port())
    processes = [
        subprocess.Popen(
            [sys.executable, str(program), *arguments],
            env=rank_environment(
                RANK=str(rank),
                WORLD_SIZE=str(num_ranks),
                LOCAL_RANK=str(rank),
                MASTER_ADDR="127.0.0.1",
                MASTER_PORT=port,
            ),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(num_ranks)
    ]
    try:
        printed = [process.communicate(timeout=timeout_s)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(process.returncode, text) for process, text in zip(processes, printed, strict=True)]
