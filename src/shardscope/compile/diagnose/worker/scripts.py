"""`run_script`: runs a Python file in a fresh process without shardscope."""

from __future__ import annotations

import contextlib
import json
import os
import select
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

from shardscope._torch.inductor import FOR_SCRIPTS
from shardscope.compile.diagnose.worker.fork_server import FRESH, ForkServer
from shardscope.compile.diagnose.worker.process import Child, name_signal, spawn
from shardscope.compile.diagnose.worker.sandbox import Sandbox
from shardscope.compile.diagnose.worker.session_clock import SessionClock

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
