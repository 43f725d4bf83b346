"""Runs a script as the ranks of a gloo group, as torchrun would, and sees whether they hang.

A run hangs if every rank that has not ended sleeps in torch's distributed code for `_BLOCKED_S`:
the main thread sleeps, no CPU time is used, and the Python stack stays the same in `_NUM_REPORTS`
reports of another thread, which a busy machine would hold up too. It need not wait for a timeout of
gloo. A rank that has ended or raised stays alive until the run is over, because
gloo reports a closed connection where NCCL waits.

Ranks are forked from a process that has imported torch. A rank that needs another interpreter, as
one with a PYTHONHASHSEED of its own, is started afresh.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, final

import torch
import torch.distributed as dist
import torch.distributed.fsdp
import torch.distributed.tensor.parallel
import torch.utils.data

_BLOCKED_S = 1.5
_NUM_REPORTS = 8
_PERIOD_S = 0.1
_OF_COLLECTIVES = ("/torch/distributed/", "/torch/nn/parallel/")
_OF_BACKWARD = "_engine_run_backward"
_OF_OPS = "/torch/_ops.py"  # of a functional collective in a compiled graph
_FRESH = ("PYTHONHASHSEED",)
_PR_SET_PDEATHSIG = 1


@final
@dataclass(frozen=True)
class Launch:
    """A script, its arguments, and the environment of its ranks."""

    script: Path
    num_ranks: int
    arguments: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    rank_environment: Mapping[int, Mapping[str, str]] = field(default_factory=dict)
    signal: Any = None  # a Signal: rank, name, after
    timeout_s: float = 90.0


@final
@dataclass(frozen=True)
class Run:
    """How a run ended: `ended`, `hang`, `mismatch`, `failed` or `timeout`; and where ranks were."""

    outcome: str
    places: tuple[str, ...]
    outputs: tuple[str, ...]
    seconds: float


def run(launch: Launch, folder: Path) -> Run:
    """Run a script; its ranks have subfolders of `folder` as current ones."""
    start = time.monotonic()
    port = _free_port()
    ranks = [_Rank(launch, rank, port, folder) for rank in range(launch.num_ranks)]
    try:
        outcome = _watch(ranks, launch)
        places = tuple(rank.describe() for rank in ranks)
    finally:
        for rank in ranks:
            rank.kill()
    outputs = tuple(rank.read_output() for rank in ranks)
    return Run(outcome, places, outputs, time.monotonic() - start)


def _watch(ranks: list[_Rank], launch: Launch) -> str:
    deadline = time.monotonic() + launch.timeout_s
    waiting_signal = launch.signal
    while time.monotonic() < deadline:
        time.sleep(_PERIOD_S)
        for rank in ranks:
            rank.look()
        if waiting_signal and waiting_signal.after in ranks[waiting_signal.rank].read_output():
            ranks[waiting_signal.rank].send(getattr(signal, waiting_signal.name))
            waiting_signal = None
        alive = [rank for rank in ranks if not rank.is_done]
        if alive and not all(rank.is_blocked for rank in alive):
            continue
        failed = [rank for rank in ranks if rank.failure]
        if failed:
            return "mismatch" if all(rank.is_in_collective for rank in failed) else "failed"
        return "hang" if alive else "ended"
    return "timeout"


class _Rank:
    """A rank's process, and what was seen of it."""

    def __init__(self, launch: Launch, rank: int, port: int, folder: Path) -> None:
        self._folder = folder / f"rank-{rank}"
        self._folder.mkdir(parents=True, exist_ok=True)
        self._output, self._status = self._folder / "output.txt", self._folder / "status.json"
        self._blocked_since: tuple[float, int] | None = None
        self._seen: tuple[str, int] | None = None
        self._report: dict[str, Any] = {}
        self._exit_status: int | None = None
        own = launch.rank_environment.get(rank, {})
        environment = {
            **launch.environment,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "GROUP_RANK": "0",
            "WORLD_SIZE": str(launch.num_ranks),
            "LOCAL_WORLD_SIZE": str(launch.num_ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "TORCHELASTIC_RUN_ID": "proof",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_USE_AGENT_STORE": "False",
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "CUDA_VISIBLE_DEVICES": "",
            **own,
        }
        words = [str(launch.script.resolve()), *launch.arguments]
        if any(name in environment for name in _FRESH):
            self.pid = self._start(words, environment)
        else:
            self.pid = self._fork(words, environment)

    def _fork(self, words: list[str], environment: dict[str, str]) -> int:
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            os.environ.update(environment)
            try:
                _run_rank(words, self._folder)
            finally:
                os._exit(1)
        return pid

    def _start(self, words: list[str], environment: dict[str, str]) -> int:
        command = [sys.executable, "-m", "benchmarks.hangs.ranks", str(self._folder), *words]
        process = subprocess.Popen(command, env={**os.environ, **environment})
        process.returncode = 0  # it is waited for by its id, like a forked one
        return process.pid

    @property
    def is_done(self) -> bool:
        """Whether the script has ended or raised, or the process has exited."""
        return "ended" in self._report or bool(self.failure)

    @property
    def failure(self) -> str:
        """The traceback of the exception that ended the script."""
        if self._exit_status is not None and "ended" not in self._report:
            status = os.waitstatus_to_exitcode(self._exit_status)
            return f"nothing; its process died with {status} at {self._report.get('place', '')}"
        return str(self._report.get("failure", ""))

    @property
    def is_in_collective(self) -> bool:
        """Whether the rank waits or failed in torch's distributed code."""
        is_mismatch = self._exit_status is not None and "gloo::EnforceNotMet" in self.read_output()
        return is_mismatch or bool(self._report.get("is_in_collective"))

    @property
    def is_blocked(self) -> bool:
        """Whether the rank has been waiting for other ranks for long enough."""
        if self._blocked_since is None or not self.is_in_collective:
            return False
        start, number = self._blocked_since
        is_reporting = self._report.get("number", 0) - number >= _NUM_REPORTS
        return is_reporting and time.monotonic() - start > _BLOCKED_S

    def look(self) -> None:
        """Read the rank's report and whether its main thread sleeps."""
        if self._exit_status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self._exit_status = status if pid else None
        try:
            self._report = json.loads(self._status.read_text())
        except (FileNotFoundError, ValueError):
            return
        if self._exit_status is not None:
            return
        try:
            is_asleep, ticks = _read_state(self.pid)
        except FileNotFoundError:
            return
        place = self._report.get("stack", "")
        is_same = self._seen is not None and self._seen[0] == place and ticks - self._seen[1] <= 3
        if not (is_asleep and is_same):
            now = time.monotonic(), int(self._report.get("number", 0))
            self._blocked_since = now if is_asleep else None
            self._seen = (place, ticks)

    def describe(self) -> str:
        """The line of the script that the rank was at, or how it ended."""
        if self.failure:
            return "raised " + self.failure.strip().splitlines()[-1][:200]
        return "ended" if "ended" in self._report else str(self._report.get("place", "starting"))

    def read_output(self) -> str:
        """What the rank has printed."""
        return self._output.read_text(errors="replace") if self._output.exists() else ""

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the rank."""
        os.kill(self.pid, number)

    def kill(self) -> None:
        """End the rank and the processes that it started."""
        if self._exit_status is None:
            try:
                os.killpg(self.pid, signal.SIGKILL)
            except ProcessLookupError:
                os.kill(self.pid, signal.SIGKILL)
            self._exit_status = os.waitpid(self.pid, 0)[1]


def _run_rank(words: list[str], folder: Path) -> None:
    """Run the script in this process, which is a rank, and stay until it is killed."""
    os.setpgid(0, 0)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # not to outlive the proof
    output = os.open(folder / "output.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.chdir(folder)
    random.seed(os.urandom(8))  # forked ranks would draw the same numbers
    torch.set_num_threads(1)
    script = words[0]
    _hold_back(dist.destroy_process_group)
    report = _Reporter(folder / "status.json", script)
    sys.argv, sys.path[0] = words, str(Path(script).parent)
    try:
        runpy.run_path(script, run_name="__main__")
        report.finish({"ended": True})
    except SystemExit as exit_:
        report.finish({"ended": True} if not exit_.code else {"failure": f"exit {exit_.code}"})
    except BaseException as error:  # noqa: BLE001 - a failure is a result
        frames = list(reversed(traceback.extract_tb(error.__traceback__)))
        names, functions = [f.filename for f in frames], [f.name for f in frames]
        text = "".join(traceback.format_exception(error))
        is_in = _is_in_collective(names, functions) or "gloo" in text.lower()
        report.finish({"failure": text, "is_in_collective": is_in})
        print(text, flush=True)
    sys.stdout.flush()
    sys.stderr.flush()
    while True:
        time.sleep(60)


def _hold_back(function: Callable[..., Any]) -> None:
    """Make a function of torch.distributed do nothing."""
    for module in (dist, dist.distributed_c10d):
        setattr(module, function.__name__, lambda *_, **__: None)


class _Reporter:
    """Writes where the main thread waits, ten times a second, from another thread.

    Nothing is written while the main thread runs: its frames may be incomplete then, and CPython
    3.11 crashes where another thread follows them.
    """

    def __init__(self, path: Path, script: str) -> None:
        self._path, self._script = path, script
        self._is_finished = threading.Event()
        self._lock = threading.Lock()
        threading.Thread(target=self._repeat, daemon=True).start()

    def finish(self, report: dict[str, Any]) -> None:
        """Write a last report."""
        with self._lock:
            self._is_finished.set()
            self._write(report)

    def _repeat(self) -> None:
        main, number, before = threading.main_thread().ident, 0, -1
        while not self._is_finished.wait(_PERIOD_S):
            is_asleep, ticks = _read_state(os.getpid())
            is_waiting, before = is_asleep and ticks == before, ticks
            frame = sys._current_frames().get(main or 0) if is_waiting else None
            with self._lock:
                if frame is not None and not self._is_finished.is_set():
                    number += 1
                    self._write(_describe(frame, self._script) | {"number": number})

    def _write(self, report: dict[str, Any]) -> None:
        new = self._path.with_suffix(".new")
        new.write_text(json.dumps(report))
        new.replace(self._path)


def _read_state(pid: int) -> tuple[bool, int]:
    """Whether the main thread of a process sleeps, and the CPU time of all of its threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return fields[0] == "S", int(fields[11]) + int(fields[12])


def _describe(frame: FrameType | None, script: str) -> dict[str, Any]:
    """The stack of a thread, and the innermost line of the script."""
    frames: list[tuple[str, int, str]] = []
    while frame is not None:
        frames.append((frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
        frame = frame.f_back
    own = next((f"{Path(f).name}:{line} {name}" for f, line, name in frames if f == script), "")
    top = frames[0]
    return {
        "stack": " ".join(f"{name}:{line}" for _, line, name in frames),
        "place": f"{own} in {Path(top[0]).name}:{top[1]} {top[2]}",
        "is_in_collective": _is_in_collective([f for f, _, _ in frames], [n for *_, n in frames]),
    }


def _is_in_collective(files: Sequence[str], functions: Sequence[str]) -> bool:
    """Whether a stack, innermost frame first, is in a collective or a backward pass."""
    is_in_op = bool(files) and files[0].endswith(_OF_OPS)
    is_distributed = any(part in file for file in files for part in _OF_COLLECTIVES)
    return is_in_op or is_distributed or _OF_BACKWARD in functions


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


if __name__ == "__main__":
    _run_rank(sys.argv[2:], Path(sys.argv[1]))
