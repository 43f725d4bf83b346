"""The warm process: imports torch once, and forks a process for each job.

Started as `python -m shardscope.launch.server REQUESTS EVENTS PARENT`. From the file descriptor
REQUESTS it reads the names of files with requests, a line each, and runs the jobs of one after the
other. To EVENTS it writes a line for each step, each job and each request that ends. PARENT is the
process that has started it. On SIGTERM it ends the jobs, which save what they have recorded. If its
parent dies, everything is ended.
"""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
import signal
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import NoReturn, final

import msgspec

from shardscope.launch.data_rank import DataRank
from shardscope.launch.lockstep import OUTCOME, Coordinator
from shardscope.launch.processes import (
    StackFile,
    adopt_orphans,
    end_children,
    end_helpers,
    end_tree,
    read_cpu_seconds,
)
from shardscope.launch.program import Program
from shardscope.launch.rank_process import ProgramRun, SimulatedRank
from shardscope.launch.request import (
    HELPER,
    MAIL,
    Busy,
    Ending,
    Event,
    Job,
    JobEnded,
    Reason,
    Request,
    RequestEnded,
    StepsEnded,
)
from shardscope.launch.write_guard import forbid_writes
from shardscope.world.objects import NEEDED

__frames__ = "outermost"  # our callers are not the user's program

_POLL_SECONDS = 0.05
_IDLE_CHECK_SECONDS = 0.5  # between two checks, which read all processes of the machine
_IDLE_SHARE = 0.02  # of a processor; a process that uses less only waits, or polls
_NEEDED_SECONDS = 0.5  # that a helper runs on after a rank has waited for it
_GRACE_SECONDS = 10  # for a process to save what it has recorded
_MAX_OUTPUT = 2000  # characters of the output of a rank that failed


def main() -> None:
    """Run all jobs of each request."""
    requests, events, parent = map(int, sys.argv[1:4])
    del sys.path[0]  # this folder, because of -m
    os.set_inheritable(events, False)
    os.set_inheritable(requests, False)
    adopt_orphans()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    gc.freeze()  # jobs then neither look through torch's million objects nor copy their memory
    with open(requests, encoding="utf-8", closefd=False) as files:
        for file in files:
            request = msgspec.json.decode(Path(file.rstrip("\n")).read_bytes(), type=Request)
            Path(request.scratch, MAIL).mkdir(exist_ok=True)
            jobs = _Jobs(request, events, parent, requests)
            signal.signal(signal.SIGTERM, jobs.interrupt)
            jobs.run()
            jobs.report(RequestEnded())
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


@final
class _Jobs:
    """Runs jobs, a few at a time, and the ranks that these ask for."""

    def __init__(self, request: Request, events: int, parent: int, requests: int) -> None:
        self._request = request
        self._events = events
        self._requests = requests
        self._parent = parent
        self._waiting = list(request.jobs)
        self._running: dict[int, _Process] = {}
        self._started: set[int] = set()  # ranks
        self._is_interrupted = False
        self._coordinator = _RunningCoordinator(request) if request.lockstep else None
        self._next_idle_check = 0.0

    def run(self) -> None:
        """Run until all jobs have ended; what was started for others ends with them."""
        try:
            while self._waiting or any(not p.job.is_helper for p in self._running.values()):
                while self._waiting and len(self._running) < self._request.num_parallel:
                    self._start(self._waiting.pop(0))
                self._start_needed()
                if not self._reap():
                    self._check_progress()
                    self._check_parent()
                    time.sleep(_POLL_SECONDS)
        finally:
            end_children(apart_from=() if self._coordinator is None else (self._coordinator.pid,))
            if self._coordinator is not None:
                self._coordinator.finish()

    def _own_processes(self) -> set[int]:
        own = {*self._running}
        return own if self._coordinator is None else own | {self._coordinator.pid}

    def interrupt(self, number: int, frame: FrameType | None) -> None:
        """Called on SIGTERM: end the running jobs soon, and start no others."""
        self._is_interrupted = True

    def _start(self, job: Job) -> None:
        unused = [
            self._events,
            self._requests,
            *(running.orders for running in self._running.values()),
        ]
        if self._coordinator is not None:
            unused.append(self._coordinator.ends)
        process = _start(self._request, job, unused)
        self._running[process.pid] = process
        self._started.add(job.rank)

    def _start_needed(self) -> None:
        """Start ranks that running ones wait for, also beyond the number of parallel jobs.

        Of these, helpers are suspended while no rank waits for them.
        """
        needed = set()
        for file in Path(self._request.scratch, MAIL).glob(f"{NEEDED}*"):
            rank = int(file.name.removeprefix(NEEDED))
            needed.add(rank)
            file.unlink()
            if rank not in self._started and not self._is_interrupted:
                queued = next((job for job in self._waiting if job.rank == rank), None)
                if queued is not None:
                    self._waiting.remove(queued)
                self._start(queued or Job(rank=rank, instrument=HELPER))
        for process in self._running.values():
            if process.job.is_helper:
                process.suspend_unless(is_needed=process.job.rank in needed)

    def _reap(self) -> bool:
        """Report the jobs that have ended; whether any has."""
        has_ended = False
        for pid, process in list(self._running.items()):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                has_ended = True
                del self._running[pid]
                end_children(apart_from=self._own_processes())  # what it started and left behind
                if self._coordinator is not None:
                    self._coordinator.note_end(process.job.rank)
                if not process.job.is_helper:
                    self.report(process.describe_end(status))
        return has_ended

    def _check_progress(self) -> None:
        """Report steps and long computations; end all processes if all only wait."""
        for process in self._running.values():
            for event in process.find_news():
                self.report(event)
            process.end_overdue()
        is_waiting = self._check_idle()
        if is_waiting or self._is_interrupted:
            self._waiting.clear()
            for process in self._running.values():
                process.end(Reason.WAITED if is_waiting else Reason.INTERRUPTED)

    def _check_idle(self) -> bool:
        """Whether all processes have only waited for long; at most twice a second."""
        if time.monotonic() < self._next_idle_check:
            return False
        self._next_idle_check = time.monotonic() + _IDLE_CHECK_SECONDS
        num_idle = sum(process.check_idle() for process in self._running.values())
        return num_idle == len(self._running)

    def _check_parent(self) -> None:
        if os.getppid() != self._parent:  # it was killed
            end_children()
            shutil.rmtree(self._request.scratch, ignore_errors=True)
            os._exit(1)

    def report(self, event: Event | RequestEnded) -> None:
        """Write an event for the parent."""
        with contextlib.suppress(BrokenPipeError):
            os.write(self._events, msgspec.json.encode(event) + b"\n")


@final
class _RunningCoordinator:
    """The process that ranks in lockstep report their collectives to."""

    def __init__(self, request: Request) -> None:
        reading, self.ends = os.pipe()
        ranks = [job.rank for job in request.jobs]
        outcome = Path(request.scratch, OUTCOME)
        coordinator = Coordinator(request.lockstep, ranks, outcome, reading)
        self.pid = os.fork()
        if self.pid == 0:
            try:
                os.close(self.ends)
                coordinator.run()
            finally:
                os._exit(0)
        coordinator.close()
        os.close(reading)

    def note_end(self, rank: int) -> None:
        """The process of a rank has ended."""
        with contextlib.suppress(BrokenPipeError):
            os.write(self.ends, rank.to_bytes(4, "little"))

    def finish(self) -> None:
        """Wait until the outcome is written: all ranks have ended."""
        os.close(self.ends)
        os.waitpid(self.pid, 0)


@final
class _Process:
    """A job's process. It gets orders through a pipe, and ends if that is closed."""

    def __init__(self, request: Request, job: Job, pid: int, orders: int) -> None:
        self.job = job
        self.pid = pid
        self._request = request
        self.orders = orders
        self._reason: Reason | None = None
        self._place: str | None = None
        self._num_steps = 0
        self._deadline: float | None = None  # to end, once it was ordered to
        self._since, self._cpu = time.monotonic(), 0.0  # when it last did more than wait
        self._last_news = self._last_needed = time.monotonic()
        self._is_suspended = False
        self._has_been_busy = False
        self._stack = StackFile(Path(request.scratch, f"{job.stem}.stack.txt"))

    def suspend_unless(self, *, is_needed: bool) -> None:
        """Suspend the process some time after it was last needed; resume it when it is again."""
        now = time.monotonic()
        if is_needed:
            self._last_needed = now
        is_suspended = now - self._last_needed > _NEEDED_SECONDS
        if is_suspended != self._is_suspended:
            self._is_suspended = is_suspended
            os.kill(self.pid, signal.SIGSTOP if is_suspended else signal.SIGCONT)

    def check_idle(self) -> bool:
        """Whether the process has hardly used the processor for a long time."""
        now, cpu = time.monotonic(), read_cpu_seconds(self.pid)
        seconds = now - self._since
        if cpu - self._cpu > max(seconds, 1) * _IDLE_SHARE:
            self._since, self._cpu = now, cpu
            return False
        return seconds > self._request.patience_s

    def find_news(self) -> list[Event]:
        """A step that has ended, or that the process computes for long without one."""
        content = self._read("steps")
        num_steps = 0 if content is None else int(content)
        if num_steps > self._num_steps:
            self._num_steps, self._last_news = num_steps, time.monotonic()
            self._has_been_busy = False
            return [StepsEnded(job=self.job, num_steps=num_steps)]
        now = time.monotonic()
        seconds, is_computing = now - self._last_news, now - self._since < 1
        if not is_computing or seconds < self._request.patience_s or self._has_been_busy:
            return []
        self._has_been_busy = True
        return [Busy(job=self.job, place=self._find_line(), seconds=int(seconds))]

    def end(self, reason: Reason) -> None:
        """Note where the process is, and let it save what it has recorded and end."""
        self.suspend_unless(is_needed=True)  # else it would not notice
        if self._deadline is None:
            self._reason = reason
            self._place = self._find_line()
            self._deadline = time.monotonic() + _GRACE_SECONDS
            with contextlib.suppress(OSError):
                os.write(self.orders, b"e")

    def end_overdue(self) -> None:
        """End a process that does not obey."""
        if self._deadline is not None and time.monotonic() > self._deadline:
            end_tree(self.pid)

    def describe_end(self, status: int) -> JobEnded:
        """What became of the job."""
        os.close(self.orders)
        content = self._read("ending")
        is_shown = self._request.is_shown and self.job == self._request.jobs[0]
        log = Path(self._request.scratch, f"{self.job.stem}.log")
        if content is None and self._place is None:
            self._place = self._stack.find_line()
        return JobEnded(
            job=self.job,
            ending=None if content is None else msgspec.json.decode(content, type=Ending),
            num_steps=self._num_steps,
            signal=os.WTERMSIG(status) if os.WIFSIGNALED(status) else None,
            place=self._place,
            reason=self._reason,
            output="" if is_shown or not log.exists() else _read_end(log),
        )

    def _find_line(self) -> str:
        """The innermost line of the program, from the stack that the process writes to a file."""
        self._stack.request(self.pid)
        time.sleep(0.2)
        return self._stack.find_line() or "an unknown line"

    def _read(self, name: str) -> bytes | None:
        path = Path(self._request.scratch, f"{self.job.stem}.{name}.json")
        return path.read_bytes() if path.exists() else None


def _read_end(log: Path) -> str:
    """The last lines of what a program has printed."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - _MAX_OUTPUT))
        return file.read().decode(errors="replace")


def _start(request: Request, job: Job, unused: list[int]) -> _Process:
    """Fork the process of a job, in which the descriptors `unused` are closed."""
    reading, writing = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        for descriptor in (*unused, writing):
            os.close(descriptor)  # else the other processes would not notice that this one is gone
        _run_job(request, job, reading)
    os.close(reading)
    return _Process(request, job, pid, writing)


def _run_job(request: Request, job: Job, orders: int) -> NoReturn:
    """Run in the forked process: the program, then write what was recorded, and exit."""
    exit_now, code = os._exit, 3
    try:
        os.setsid()
        adopt_orphans()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        StackFile(Path(request.scratch, f"{job.stem}.stack.txt")).open()
        if job != request.jobs[0] or not request.is_shown:
            _redirect_output(Path(request.scratch, f"{job.stem}.log"))
        sys.dont_write_bytecode = True  # Python would write it next to the program
        forbid_writes(apart_from=(request.scratch, "/dev", "/proc", "/sys"))
        rank = DataRank(request, job) if request.has_data else SimulatedRank(request, job)
        run = ProgramRun(
            request,
            job,
            Program(request.script, request.args, request.is_module),
            rank=rank,
            evaluations=rank.evaluations if isinstance(rank, SimulatedRank) else None,
        )
        threading.Thread(target=_follow_orders, args=(orders, run), daemon=True).start()
        with rank.entered():
            code = run.run()
        if isinstance(rank, DataRank) and code == 0:
            rank.wait_for_others()
        end_helpers()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        exit_now(code)  # no exit handlers: some wait for threads, or for other ranks


def _follow_orders(orders: int, run: ProgramRun) -> None:
    """End the program when that is ordered, and everything when the warm process is gone."""
    if os.read(orders, 1):
        for _ in range(_GRACE_SECONDS):  # a program may catch the exception and go on
            run.interrupt()
            time.sleep(1)
    end_tree(os.getpid())


def _redirect_output(path: Path) -> None:
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)


if __name__ == "__main__":
    main()
