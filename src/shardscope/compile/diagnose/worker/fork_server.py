"""Processes that have imported torch and done nothing else: `ForkServer` and `FreshProcess`.

Importing torch takes seconds, a fork a millisecond. Forking is safe because the fork server has
done nothing else; the user's process, which may have threads and devices, is never forked.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import select
import socket
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import final

import torch

from shardscope._torch.preload import FOR_FORKS, FOR_SCRIPTS
from shardscope.compile.diagnose.worker.process import (
    LAST_WAIT_S,
    Child,
    SessionClock,
    end_group,
    name_signal,
    open_output,
    spawn,
)
from shardscope.compile.diagnose.worker.sandbox import Sandbox

FRESH = Path(__file__).with_name("script_runner.py")
_IMPORTED = ",".join(FOR_FORKS)
_KILLED = -9
_MAX_REPLY = 1024


def open_fork_server(sandbox: Sandbox) -> ForkServer | None:
    """A fork server for the processes of a sandbox; None if forking is not safe."""
    # Importing torch may initialize a device driver, which does not survive a fork.
    has_devices = torch.version.cuda or torch.version.hip or torch.version.xpu
    return ForkServer(sandbox) if sys.platform == "linux" and not has_devices else None


@final
class ForkServer:
    """Starts the server process without waiting for it; `fork` does not wait, either."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._control, child_socket = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._serials = itertools.count()
        self._pids: dict[int, int] = {}
        self._lock = threading.Lock()
        is_tied = threading.current_thread() is threading.main_thread()
        arguments = (os.getpid(), "tied" if is_tied else "free", _IMPORTED, child_socket.fileno())
        with child_socket:
            self._child = spawn(
                [sys.executable, "-P", str(FRESH), *map(str, arguments)],
                environment=sandbox.environment(),
                folder=sandbox.work,
                pass_fds=(child_socket.fileno(),),
            )

    def __enter__(self) -> ForkServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pid(self) -> int:
        """Process id of the server, the parent of its forks."""
        assert self._child.pid is not None
        return self._child.pid

    def fork(self, code: str, *arguments: str, pass_fds: Sequence[int]) -> Child:
        """Fork and run code as `python -c` would, or a script if `code` is empty; fds are
        arguments too.
        """
        serial = next(self._serials)
        reading, writing = open_output()
        death_reader, death_writer = os.pipe()
        os.set_blocking(death_reader, False)
        request = json.dumps([serial, code, *arguments]).encode()
        with suppress(BrokenPipeError):  # the server is dead, which its forks report
            socket.send_fds(self._control, [request], [writing, death_writer, *pass_fds])
        for fd in (writing, death_writer):
            os.close(fd)
        return Child(_Fork(self, serial, death_reader), reading)

    def find_pid(self, serial: int) -> int | None:
        """Process id of a fork; None before it exists."""
        with self._lock, suppress(OSError):
            while reply := self._control.recv(_MAX_REPLY, socket.MSG_DONTWAIT):
                number, pid = json.loads(reply)
                self._pids[number] = pid
        return self._pids.get(serial)

    def close(self) -> None:
        """Kill the server and all of its forks."""
        self._child.kill()
        self._control.close()


@final
class _Fork:
    """A child of the fork server, which waits for it and reports its exit code."""

    def __init__(self, fork_server: ForkServer, serial: int, death_fd: int) -> None:
        self._fork_server = fork_server
        self._serial = serial
        self._exit_code: int | None = None
        self._is_orphan = False
        self.death_fd = death_fd

    @property
    def pid(self) -> int | None:
        return self._fork_server.find_pid(self._serial)

    @property
    def exit_code(self) -> int | None:
        return self._exit_code

    def has_ended(self) -> bool:
        if self._exit_code is None:
            with suppress(BlockingIOError):
                # It dies with the server, which then reports nothing.
                reply = os.read(self.death_fd, _MAX_REPLY)
                self._is_orphan = not reply
                self._exit_code = int(reply or _KILLED)
        return self._exit_code is not None

    def end(self) -> None:
        self.has_ended()
        pid = self.pid
        # Before it exists, the server ends it once the reading end of its pipe is closed.
        if pid is None or self._is_orphan:
            return
        end_group(pid)
        if self._exit_code is None:
            poll = select.poll()
            poll.register(self.death_fd, select.POLLIN)
            poll.poll(LAST_WAIT_S * 1e3)
            self.has_ended()

    def close(self) -> None:
        os.close(self.death_fd)


_START_LIMIT_S = 300.0
_LOOK_MS = 200


@final
@dataclass(frozen=True)
class ScriptRun:
    """The exit code and the last output of a script."""

    exit_code: int | None  # None if a signal ended it
    output: str
    is_timeout: bool = False
    signal: str = ""


@final
class FreshProcess:
    """A Python process that has imported torch and nothing else; it runs one script."""

    def __init__(
        self,
        sandbox: Sandbox,
        *,
        extra: Mapping[str, str] | None = None,
        imports: Sequence[str] = FOR_SCRIPTS,
        fork_server: ForkServer | None = None,
    ) -> None:
        child_in, self._requests = os.pipe()
        self._replies, child_out = os.pipe()
        self._close = weakref.finalize(self, _close, self._requests, self._replies)
        try:
            self._child = _start((child_in, child_out), sandbox, extra, imports, fork_server)
        except BaseException:
            self._close()
            raise
        finally:
            _close(child_in, child_out)

    def __enter__(self) -> FreshProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def kill(self) -> None:
        """Kill it and its children."""
        self._child.kill()
        self._close()

    def run(self, path: Path, *, timeout_s: float, arguments: Sequence[str] = ()) -> ScriptRun:
        """Run the script for at most `timeout_s` seconds of a `SessionClock`, after torch is
        imported.
        """
        with self:
            self._await_torch()
            self._ask([str(path.absolute()), *arguments])
            has_ended = self._child.await_end(timeout_s)
        return _describe(self._child, has_ended=has_ended)

    def _await_torch(self) -> None:
        """Wait until the process closes its end of the pipe: it is ready, or dead."""
        poll = select.poll()
        poll.register(self._replies, 0)
        clock = SessionClock(-1)
        while not poll.poll(_LOOK_MS) and clock.look() < _START_LIMIT_S:
            clock.session = self._child.pid or -1  # it has no pid before it is forked
            self._child.read_output()

    def _ask(self, request: list[str]) -> None:
        with contextlib.suppress(BrokenPipeError):  # its end is reported later
            os.write(self._requests, json.dumps(request).encode())
        self._close()


def _start(
    fds: tuple[int, int],
    sandbox: Sandbox,
    extra: Mapping[str, str] | None,
    imports: Sequence[str],
    fork_server: ForkServer | None,
) -> Child:
    if fork_server is not None:
        assert extra is None, "a process that has begun keeps its environment"
        return fork_server.fork("", ",".join(imports), pass_fds=fds)
    is_tied = threading.current_thread() is threading.main_thread()
    command_arguments = (os.getpid(), "tied" if is_tied else "free", ",".join(imports), *fds)
    return spawn(
        [sys.executable, "-P", str(FRESH), *map(str, command_arguments)],
        environment=sandbox.environment(extra),
        folder=sandbox.work,
        pass_fds=fds,
    )


def prewarm(
    sandbox: Sandbox,
    *,
    imports: Sequence[str] = FOR_SCRIPTS,
    fork_server: ForkServer | None = None,
) -> FreshProcess:
    """Start a process in advance for a script that runs later."""
    return FreshProcess(sandbox, imports=imports, fork_server=fork_server)


def run_script(
    path: str | os.PathLike[str],
    *,
    sandbox: Sandbox,
    timeout_s: float,
    arguments: Sequence[str] = (),
    extra: Mapping[str, str] | None = None,
    warm: FreshProcess | None = None,
) -> ScriptRun:
    """Run a Python file as `python path` would, in a new process.

    `extra` is added to its environment. A process from `prewarm` saves the import of torch.
    """
    assert warm is None or extra is None, "a process that has begun keeps its environment"
    fresh = warm or FreshProcess(sandbox, extra=extra)
    return fresh.run(Path(path), timeout_s=timeout_s, arguments=arguments)


def _describe(child: Child, *, has_ended: bool) -> ScriptRun:
    code = child.exit_code
    if not has_ended or code is None:
        return ScriptRun(None, child.output, is_timeout=True)
    if code < 0:
        return ScriptRun(None, child.output, signal=name_signal(-code))
    return ScriptRun(code, child.output)


def _close(*fds: int) -> None:
    for fd in fds:
        os.close(fd)
