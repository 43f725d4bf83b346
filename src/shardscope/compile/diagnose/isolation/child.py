"""A process in a session of its own: what it prints is kept, and it ends with all that it began."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol, final

from shardscope.compile.diagnose.isolation.session_clock import SessionClock

__all__ = ["LAST_WAIT_S", "Child", "Handle", "end_group", "name_signal", "open_output", "spawn"]

_KEPT_BYTES = 16_384
_MOMENT_MS = 200  # less where its end does not wake us
_SHORT_MOMENT_MS = 50
LAST_WAIT_S = 5.0  # a killed process that is still there is the kernel's


class Handle(Protocol):
    """A process, however it was begun."""

    @property
    def death_fd(self) -> int | None:
        """Can be read once it has ended."""

    @property
    def pid(self) -> int | None:
        """Its process id, which is its group's too; None before it has begun."""

    @property
    def exit_code(self) -> int | None:
        """As `subprocess` has it: negative for a signal. None until its end was waited for."""

    def has_ended(self) -> bool:
        """Whether it ended, without making its number free while its children still run."""

    def end(self) -> None:
        """End its group, and wait until that is done."""

    def close(self) -> None:
        """Forget it."""


@final
class Child:
    """A process that has a session of its own, and what it prints."""

    def __init__(self, handle: Handle, output_fd: int) -> None:
        self._handle = handle
        self.output_fd = output_fd
        self.death_fd = handle.death_fd
        self._output = bytearray()
        self._is_talking = True
        # Also when whoever began it forgets it, or this process ends.
        self._end = weakref.finalize(self, _end, handle, output_fd, os.getpid())

    @property
    def pid(self) -> int | None:
        """Its process id, which is its group's too; None before it has begun."""
        return self._handle.pid

    @property
    def is_dead(self) -> bool:
        """Whether it ended, by itself or by `kill`."""
        return self._handle.exit_code is not None or self._handle.has_ended()

    @property
    def output(self) -> str:
        """The last that it printed."""
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
        """As `subprocess` has it: negative for a signal."""
        return self._handle.exit_code

    def keep_output(self) -> bool:
        """Take in what it printed since; whether there may be more to come."""
        while True:
            try:
                chunk = os.read(self.output_fd, 65_536)
            except BlockingIOError:
                return True
            if not chunk:
                return False
            self._output += chunk
            del self._output[:-_KEPT_BYTES]

    def await_end(self, limit_s: float) -> bool:
        """Wait until it has ended, for so many seconds of a `SessionClock`; whether it has."""
        clock = SessionClock(-1)
        while not self.is_dead:
            clock.session = self.pid or -1  # before it is forked it has none
            if clock.look() > limit_s:
                return False
            self._is_talking = self.keep_output()
            self._sleep()
        return True

    def signal(self, number: int) -> None:
        """Send it a signal, if it is still there."""
        pid = self.pid
        if pid is not None and not self.is_dead:
            os.kill(pid, number)

    def _sleep(self) -> None:
        """Until it prints something or ends, or a moment has passed."""
        poll = select.poll()
        for fd in (self.output_fd if self._is_talking else None, self.death_fd):
            if fd is not None:
                poll.register(fd, select.POLLIN)
        poll.poll(_SHORT_MOMENT_MS if self.death_fd is None else _MOMENT_MS)

    def kill(self) -> None:
        """End it and all that it began, now; what it printed last is kept."""
        if self._end.alive:
            self._handle.end()
            self.keep_output()
            self._end()


def spawn(
    command: Sequence[str],
    *,
    environment: Mapping[str, str],
    folder: Path,
    pass_fds: Sequence[int] = (),
) -> Child:
    """Run `command`; Ctrl-C in the terminal does not reach it, and its output stays here."""
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
    """A pipe for what a process prints, of which reading waits for nothing."""
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    return reading, writing


def end_group(pid: int) -> None:
    """Kill a process and those that it began, unless they are gone."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


@final
class _Spawned:
    """A child of this process."""

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
        # The group first: once its leader is waited for, the number may be somebody else's.
        if self.exit_code is None:
            end_group(self.pid)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(LAST_WAIT_S)

    def close(self) -> None:
        if self.death_fd is not None:
            os.close(self.death_fd)


def name_signal(number: int) -> str:
    """SIGSEGV and the like."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _watch_death(pid: int) -> int | None:
    """Something to wait on: a pipe does not tell, where a child of the child holds it too."""
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return None


def _end(handle: Handle, output_fd: int, owner: int) -> None:
    if os.getpid() != owner:  # a fork of the process that began it
        return
    handle.end()
    handle.close()
    os.close(output_fd)
