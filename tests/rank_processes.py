"""Real processes, each one rank of a gloo group."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from warm_python import Program

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
    num_ranks: int, *program: str | Path, timeout_s: int = TIMEOUT_S, **environment: str
) -> list[tuple[int, str]]:
    """Run a program, with its arguments, on real ranks; return how each ended and what it printed.

    Its folder is the current one.
    """
    port = str(free_port())
    ranks = [
        Program(
            *program,
            env=rank_environment(
                RANK=str(rank),
                WORLD_SIZE=str(num_ranks),
                LOCAL_RANK=str(rank),
                MASTER_ADDR="127.0.0.1",
                MASTER_PORT=port,
                **environment,
            ),
            is_merged=True,
        )
        for rank in range(num_ranks)
    ]
    try:
        ended = [rank.wait(timeout_s=timeout_s) for rank in ranks]
    finally:
        for rank in ranks:
            rank.end()
    return [(one.returncode, one.stdout) for one in ended]
