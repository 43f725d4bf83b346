"""Starts real gloo ranks with a fault, waits until the others are stuck, and keeps their files."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

PROGRAM = Path(__file__).parent / "program.py"
TIMEOUT_S = 90


def run_ranks(
    folder: Path,
    mesh: dict[str, int],
    fault: str,
    *,
    rank: int,
    place: str = "tp",
    stream: bool = False,
    python: str = sys.executable,
    **options: str,
) -> Path:
    """Run a fault until every rank that can has written its dumps, then end all ranks."""
    folder.mkdir(parents=True, exist_ok=True)
    num_ranks = 1
    for size in mesh.values():
        num_ranks *= size
    environment = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(find_port()),
        "WORLD_SIZE": str(num_ranks),
        "MESH": ",".join(f"{name}={size}" for name, size in mesh.items()),
        "FAULT": fault,
        "FAULT_RANK": str(rank),
        "FAULT_PLACE": place,
        "OMP_NUM_THREADS": "1",
        "TORCH_FR_BUFFER_SIZE": "2000",
        "STREAM": "1" if stream else "",
        **options,
    }
    processes = []
    for number in range(num_ranks):
        log = (folder / f"log_{number}.txt").open("w")
        processes.append(
            subprocess.Popen(
                [python, str(PROGRAM), str(folder)],
                env={**environment, "RANK": str(number), "LOCAL_RANK": str(number)},
                stdout=log,
                stderr=log,
                cwd=folder,
            )
        )
    try:
        wait_for_dumps(folder, processes)
    finally:
        for process in processes:
            with suppress(ProcessLookupError):
                process.send_signal(signal.SIGCONT)
                process.kill()
        for process in processes:
            process.wait()
    for file in folder.glob("done_*"):
        file.unlink()
    return folder


def wait_for_dumps(folder: Path, processes: list[subprocess.Popen[bytes]]) -> None:
    """Until all ranks that run have written their dumps."""
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        time.sleep(0.05)
        running = [number for number, process in enumerate(processes) if is_running(process)]
        if all((folder / f"done_{number}").exists() for number in running):
            return


def is_running(process: subprocess.Popen[bytes]) -> bool:
    """Whether a process exists and is not stopped."""
    if process.poll() is not None:
        return False
    return "State:\tT" not in Path(f"/proc/{process.pid}/status").read_text()


def find_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]
