"""A process in a session of its own: what it prints is kept, and it ends with all that it began."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import time
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import final

__all__ = ["Child", "name_signal"]

_KEPT_BYTES = 16_384
_MOMENT_MS = 50
_LAST_WAIT_S = 5.0  # a killed process that is still there is the kernel's


@final
class Child:
    """Runs `command`; Ctrl-C in the terminal does not reach it, and its output stays here."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str],
        folder: Path,
        pass_fds: Sequence[int] = (),
    ) -> None:
        reading, writing = os.pipe()
        os.set_blocking(reading, False)
        try:
            self._process = subprocess.Popen(
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
        self.output_fd = reading
        self._output = bytearray()
        self._is_talking = True
        self.death_fd = _watch_death(self._process.pid)
        fds = (reading, *(() if self.death_fd is None else (self.death_fd,)))
        # Also when whoever began it forgets it, or this process ends.
        self._end = weakref.finalize(self, _end, self._process, fds, os.getpid())

    @property
    def pid(self) -> int:
        """Its process id, which is its group's too."""
        return self._process.pid

    @property
    def is_dead(self) -> bool:
        """Whether it ended, by itself or by `kill`."""
        return self._process.returncode is not None or _has_ended(self._process.pid)

    @property
    def output(self) -> str:
        """The last that it printed."""
        return self._output.decode(errors="replace")

    @property
    def end(self) -> str:
        """How it ended: the name of a signal, or its exit code."""
        code = self._process.returncode
        if code is None:
            return "it does not end"
        return f"exit code {code}" if code >= 0 else name_signal(-code)

    @property
    def exit_code(self) -> int | None:
        """As `subprocess` has it: negative for a signal."""
        return self._process.returncode

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
        """Wait until it has ended; whether it has."""
        deadline = time.monotonic() + limit_s
        while not self.is_dead:
            if time.monotonic() > deadline:
                return False
            self._is_talking = self.keep_output()
            self._sleep()
        return True

    def signal(self, number: int) -> None:
        """Send it a signal, if it is still there."""
        with suppress(ProcessLookupError):
            self._process.send_signal(number)

    def _sleep(self) -> None:
        """Until it prints something or ends, or a moment has passed."""
        poll = select.poll()
        for fd in (self.output_fd if self._is_talking else None, self.death_fd):
            if fd is not None:
                poll.register(fd, select.POLLIN)
        poll.poll(_MOMENT_MS)

    def kill(self) -> None:
        """End it and all that it began, now; what it printed last is kept."""
        if self._end.alive:
            _kill_group(self._process)
            self.keep_output()
            self._end()


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


def _has_ended(pid: int) -> bool:
    """Without waiting for it, which would make its number free while its children still run."""
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return True


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    # The group first: once its leader is waited for, the number may be somebody else's.
    if process.returncode is None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):
        process.wait(_LAST_WAIT_S)


def _end(process: subprocess.Popen[bytes], fds: Sequence[int], owner: int) -> None:
    if os.getpid() != owner:  # a fork of the process that began it
        return
    _kill_group(process)
    for fd in fds:
        os.close(fd)
