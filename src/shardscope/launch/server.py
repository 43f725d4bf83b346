"""The warm process: imports torch once, and forks a process for each job.

Started by `run` as `python -m shardscope.launch.server REQUEST EVENTS`, where REQUEST is a file and
EVENTS a file descriptor to which a line is written for each job that ends.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import NoReturn, final

import msgspec
from msgspec.structs import replace

from shardscope.launch.data_rank import DataRank
from shardscope.launch.instruments import make_instrument
from shardscope.launch.program import Program
from shardscope.launch.rank_process import SimulatedRank, run_program, save_results
from shardscope.launch.request import HELPER, MAIL, Ending, Job, JobEnded, Request
from shardscope.world.objects import NEEDED

__frames__ = "outermost"  # our callers are not the user's program

_POLL_SECONDS = 0.05
_PATIENCE_SECONDS = 60  # without any use of the processor, before a process counts as waiting
_IDLE_CPU_SECONDS = 0.05


def main() -> None:
    """Run all jobs of the request."""
    request = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=Request)
    events = int(sys.argv[2])
    os.set_inheritable(events, False)
    Path(request.scratch, MAIL).mkdir(exist_ok=True)
    _Jobs(request, events).run()


@final
class _Jobs:
    """Runs jobs, a few at a time, and the ranks that these ask for."""

    def __init__(self, request: Request, events: int) -> None:
        self._request = request
        self._events = events
        self._waiting = list(request.jobs)
        self._running: dict[int, _Process] = {}
        self._started: set[int] = set()  # ranks
        self._since = time.monotonic()  # when a process has last used the processor

    def run(self) -> None:
        """Run until all jobs have ended; what was started for others ends with them."""
        try:
            while self._waiting or any(not p.job.is_helper for p in self._running.values()):
                while self._waiting and len(self._running) < self._request.num_parallel:
                    self._start(self._waiting.pop(0))
                self._start_needed()
                if not self._reap():
                    self._check_progress()
                    time.sleep(_POLL_SECONDS)
        finally:
            for process in self._running.values():
                process.kill()

    def _start(self, job: Job) -> None:
        process = _start(self._request, job)
        self._running[process.pid] = process
        self._started.add(job.rank)

    def _start_needed(self) -> None:
        """Start ranks that running ones wait for, also beyond the number of parallel jobs."""
        for file in Path(self._request.scratch, MAIL).glob(f"{NEEDED}*"):
            rank = int(file.name.removeprefix(NEEDED))
            file.unlink()
            if rank not in self._started:
                queued = next((job for job in self._waiting if job.rank == rank), None)
                if queued is not None:
                    self._waiting.remove(queued)
                self._start(queued or Job(rank=rank, instrument=HELPER))

    def _reap(self) -> bool:
        """Report the jobs that have ended; whether any has."""
        has_ended = False
        for pid, process in list(self._running.items()):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                has_ended = True
                del self._running[pid]
                ended = process.end(status)
                if not process.job.is_helper:
                    os.write(self._events, msgspec.json.encode(ended) + b"\n")
        return has_ended

    def _check_progress(self) -> None:
        """End all processes if none has used the processor for a long time."""
        working = [process for process in self._running.values() if process.has_worked()]
        if working:
            self._since = time.monotonic()
        elif time.monotonic() - self._since > _PATIENCE_SECONDS:
            for process in self._running.values():
                process.end_waiting()


@final
class _Process:
    """A job's process, in a session of its own, so that all it starts can be ended with it."""

    def __init__(self, job: Job, pid: int, scratch: str) -> None:
        self.job = job
        self.pid = pid
        self._waiting_at: str | None = None
        self._scratch = scratch
        self._cpu = 0.0

    def has_worked(self) -> bool:
        """Whether the process has used the processor since the last time that it had."""
        cpu = _read_cpu_seconds(self.pid)
        if cpu is not None and cpu <= self._cpu + _IDLE_CPU_SECONDS:
            return False
        self._cpu = cpu or 0.0
        return True

    def end_waiting(self) -> None:
        """Note the line at which the process waits, and end it."""
        if self._waiting_at is None:
            self._waiting_at = self._find_line()
            self.kill()

    def kill(self) -> None:
        """End the process and everything that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def end(self, status: int) -> JobEnded:
        """What became of the job."""
        self.kill()  # what it started and left behind
        file = Path(self._scratch, f"{self.job.stem}.ending.json")
        ending = msgspec.json.decode(file.read_bytes(), type=Ending) if file.exists() else None
        number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else None
        return JobEnded(job=self.job, ending=ending, signal=number, waiting_at=self._waiting_at)

    def _find_line(self) -> str:
        """The innermost line of the program, from the stack that the process writes to a file."""
        file = Path(self._scratch, f"{self.job.stem}.stack.txt")
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGUSR2)
        time.sleep(0.5)
        lines = file.read_text().splitlines() if file.exists() else []
        stack = [line.strip() for line in lines if line.strip().startswith("File ")]
        user = [line for line in stack if "site-packages" not in line and "/lib/python" not in line]
        return next(iter(user or stack), "an unknown line")


def _start(request: Request, job: Job) -> _Process:
    parent_end, child_end = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        os.close(child_end)
        _run_job(request, job, parent_end)
    os.close(parent_end)  # the other end stays open as long as this process lives
    return _Process(job, pid, request.scratch)


def _run_job(request: Request, job: Job, lifeline: int) -> NoReturn:
    """Run in the forked process: the program, then write what was recorded, and exit."""
    os.setsid()
    code = 3
    try:
        threading.Thread(target=_end_with_parent, args=(lifeline,), daemon=True).start()
        stack_file = open(Path(request.scratch, f"{job.stem}.stack.txt"), "w")  # noqa: SIM115
        faulthandler.register(signal.SIGUSR2, file=stack_file, all_threads=False)
        if job != request.jobs[0] or not request.is_shown:
            _redirect_output(Path(request.scratch, f"{job.stem}.log"))
        rank = DataRank(request, job) if request.has_data else SimulatedRank(request, job)
        program = Program(request.script, request.args, request.is_module)
        instrument = make_instrument(job.instrument, request.gpu)
        with rank.entered():
            ending, recording = run_program(
                program,
                request.num_steps,
                instrument,
                is_simulated=not request.has_data,
                evaluations=rank.evaluations if isinstance(rank, SimulatedRank) else None,
            )
        if recording is not None:
            recording = replace(recording, gaps=(*recording.gaps, *rank.find_gaps()))
        save_results(request, job, ending, recording)
        if isinstance(rank, DataRank) and ending.failure is None:
            rank.wait_for_others()
        code = 0
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)  # no exit handlers: some wait for threads, or for other ranks


def _end_with_parent(lifeline: int) -> None:
    """End this process and what it started when the warm process is gone."""
    os.read(lifeline, 1)
    os.killpg(0, signal.SIGKILL)


def _redirect_output(path: Path) -> None:
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)


def _read_cpu_seconds(pid: int) -> float | None:
    """The processor time of a process and the children it has waited for; None if not known."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
