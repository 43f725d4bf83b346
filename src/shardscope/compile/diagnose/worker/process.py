"""A process in its own session: its output is recorded, and it is killed with its children.

`SessionClock` measures time limits independently of the load on the machine.
"""

from __future__ import annotations

import glob
import os
import select
import signal
import subprocess
import time
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol, final


@final
class SessionClock:
    """Counts the seconds in which the processes of a session ran or slept voluntarily.

    `session` may be a process group.

    Seconds in which a process was ready to run, or waited for a disk, without progress do not
    count, so load on the machine does not look like a slow program. Without /proc all seconds
    count.
    """

    LONGEST_STEP = 1.0  # a longer gap means that this process had no CPU, either

    def __init__(self, session: int) -> None:
        self.session = session
        self.seconds = 0.0
        self.processes: set[str] = set()  # seen so far
        self._used = 0.0
        self._last = 0.0

    def look(self) -> float:
        """Count the time since the last call; returns all seconds so far."""
        now, used, is_ready = time.monotonic(), 0.0, False
        for stat in glob.glob("/proc/[0-9]*/stat"):
            fields = self._read(stat)
            if len(fields) > 14 and str(self.session) in fields[2:4]:
                self.processes.add(stat)
                used += sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
                threads = glob.glob(os.path.join(os.path.dirname(stat), "task", "*", "stat"))
                is_ready |= any(self._read(thread)[:1] in (["R"], ["D"]) for thread in threads)
        if self._last:
            passed = min(now - self._last, self.LONGEST_STEP)
            self.seconds += min(passed, max(0.0, used - self._used)) if is_ready else passed
        self._last, self._used = now, used
        return self.seconds

    def _read(self, stat: str) -> list[str]:
        """The fields of /proc/…/stat after the process name; the first is its state."""
        try:
            with open(stat) as file:
                return file.read().rpartition(")")[2].split()
        except OSError:  # it has ended
            return []


_MAX_OUTPUT_BYTES = 16_384
_POLL_MS = 200  # shorter if there is no file descriptor for its end
_SHORT_POLL_MS = 50
LAST_WAIT_S = 5.0  # a killed process that still exists after this waits for the kernel


class Handle(Protocol):
    """A process, spawned or forked."""

    @property
    def death_fd(self) -> int | None:
        """Becomes readable when the process has ended."""

    @property
    def pid(self) -> int | None:
        """Its process id, which is also its group's; None before it has started."""

    @property
    def exit_code(self) -> int | None:
        """As in `subprocess`: negative for a signal. None until the process was waited for."""

    def has_ended(self) -> bool:
        """Whether it has ended; its pid is not released while its children still run."""

    def end(self) -> None:
        """Kill its process group, and wait for it."""

    def close(self) -> None:
        """Release its file descriptors."""


@final
class Child:
    """A process in its own session, with its output."""

    def __init__(self, handle: Handle, output_fd: int) -> None:
        self._handle = handle
        self.output_fd = output_fd
        self.death_fd = handle.death_fd
        self._output = bytearray()
        self._has_open_output = True
        # Also when the object is garbage-collected, or this process ends.
        self._end = weakref.finalize(self, _end, handle, output_fd, os.getpid())

    @property
    def pid(self) -> int | None:
        """Its process id, which is also its group's; None before it has started."""
        return self._handle.pid

    @property
    def is_dead(self) -> bool:
        """Whether it has ended."""
        return self._handle.exit_code is not None or self._handle.has_ended()

    @property
    def output(self) -> str:
        """The last output that was read from it."""
        return self._output.decode(errors="replace")

    @property
    def end(self) -> str:
        """How it ended: the name of a signal, or its exit code."""
        code = self._handle.exit_code
        if code is None:
            return "it does not finish"
        return f"exit code {code}" if code >= 0 else name_signal(-code)

    @property
    def exit_code(self) -> int | None:
        """As in `subprocess`: negative for a signal."""
        return self._handle.exit_code

    def read_output(self) -> bool:
        """Read its new output; returns whether more may come."""
        while True:
            try:
                chunk = os.read(self.output_fd, 65_536)
            except BlockingIOError:
                return True
            if not chunk:
                return False
            self._output += chunk
            del self._output[:-_MAX_OUTPUT_BYTES]

    def await_end(self, limit_s: float) -> bool:
        """Wait for its end, up to `limit_s` seconds of a `SessionClock`; returns whether it
        ended.
        """
        clock = SessionClock(-1)
        while not self.is_dead:
            clock.session = self.pid or -1  # it has no pid before it is forked
            if clock.look() > limit_s:
                return False
            self._has_open_output = self.read_output()
            self._sleep()
        return True

    def signal(self, number: int) -> None:
        """Send it a signal, if it is still running."""
        pid = self.pid
        if pid is not None and not self.is_dead:
            os.kill(pid, number)

    def _sleep(self) -> None:
        """Wait until it prints something or ends, or for a short time."""
        poll = select.poll()
        for fd in (self.output_fd if self._has_open_output else None, self.death_fd):
            if fd is not None:
                poll.register(fd, select.POLLIN)
        poll.poll(_SHORT_POLL_MS if self.death_fd is None else _POLL_MS)

    def kill(self) -> None:
        """Kill it and its children; its last output remains available."""
        if self._end.alive:
            self._handle.end()
            self.read_output()
            self._end()


def spawn(
    command: Sequence[str],
    *,
    environment: Mapping[str, str],
    folder: Path,
    pass_fds: Sequence[int] = (),
) -> Child:
    """Run `command` in a new session: Ctrl-C does not reach it, and its output is captured."""
    reading, writing = open_output()
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=writing,
            stderr=writing,
            env=dict(environment),
            cwd=folder,
            pass_fds=pass_fds,
            start_new_session=True,
        )
    except BaseException:
        os.close(reading)
        raise
    finally:
        os.close(writing)
    return Child(_Spawned(process), reading)


def open_output() -> tuple[int, int]:
    """A pipe for a process's output, with a non-blocking reading end."""
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    return reading, writing


def end_group(pid: int) -> None:
    """Kill a process and its children, unless they have ended."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


@final
class _Spawned:
    """A process that this process spawned."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self.death_fd = _watch_death(process.pid)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        return self._process.returncode

    def has_ended(self) -> bool:
        try:
            ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return True
        return ended is not None

    def end(self) -> None:
        # The group first: once its leader is waited for, the pid may be reused.
        if self.exit_code is None:
            end_group(self.pid)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(LAST_WAIT_S)

    def close(self) -> None:
        if self.death_fd is not None:
            os.close(self.death_fd)


def name_signal(number: int) -> str:
    """The name of a signal, for example SIGSEGV."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _watch_death(pid: int) -> int | None:
    """A pidfd to wait on; a pipe is not enough, because grandchildren may hold it open."""
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return None


def _end(handle: Handle, output_fd: int, owner: int) -> None:
    if os.getpid() != owner:  # a fork of the process that started it
        return
    handle.end()
    handle.close()
    os.close(output_fd)
