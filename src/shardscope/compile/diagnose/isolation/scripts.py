"""`run_script`: a Python file in a fresh process, which knows nothing of us."""

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

from shardscope._torch.preloading import FOR_SCRIPTS
from shardscope.compile.diagnose.isolation.child import Child, name_signal, spawn
from shardscope.compile.diagnose.isolation.enclosure import Enclosure
from shardscope.compile.diagnose.isolation.nursery import FRESH, Nursery
from shardscope.compile.diagnose.isolation.session_clock import SessionClock

__all__ = ["FreshProcess", "ScriptResult", "prewarm", "run_script"]

_START_LIMIT_S = 300.0
_LOOK_MS = 200


@final
@dataclass(frozen=True)
class ScriptResult:
    """How a script ended, and the last that it printed."""

    exit_code: int | None  # None if a signal ended it
    output: str
    is_timeout: bool = False
    signal: str = ""


@final
class FreshProcess:
    """A Python that has imported torch and nothing else; it runs one script."""

    def __init__(
        self,
        enclosure: Enclosure,
        *,
        extra: Mapping[str, str] | None = None,
        imports: Sequence[str] = FOR_SCRIPTS,
        nursery: Nursery | None = None,
    ) -> None:
        theirs_in, self._requests = os.pipe()
        self._replies, theirs_out = os.pipe()
        self._close = weakref.finalize(self, _close, self._requests, self._replies)
        try:
            self._child = _start((theirs_in, theirs_out), enclosure, extra, imports, nursery)
        except BaseException:
            self._close()
            raise
        finally:
            _close(theirs_in, theirs_out)

    def __enter__(self) -> FreshProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def kill(self) -> None:
        """End it and all that it began."""
        self._child.kill()
        self._close()

    def run(self, path: Path, *, timeout_s: float, arguments: Sequence[str] = ()) -> ScriptResult:
        """Run the script for so many seconds of a `SessionClock`, once torch has been imported."""
        with self:
            self._await_torch()
            self._ask([str(path.absolute()), *arguments])
            has_ended = self._child.await_end(timeout_s)
        return _describe(self._child, has_ended=has_ended)

    def _await_torch(self) -> None:
        """It closes its end when it is ready, and so does its death."""
        poll = select.poll()
        poll.register(self._replies, 0)
        clock = SessionClock(-1)
        while not poll.poll(_LOOK_MS) and clock.look() < _START_LIMIT_S:
            clock.session = self._child.pid or -1  # before it is forked it has none
            self._child.keep_output()

    def _ask(self, request: list[str]) -> None:
        with contextlib.suppress(BrokenPipeError):  # how it died is told later
            os.write(self._requests, json.dumps(request).encode())
        self._close()


def _start(
    fds: tuple[int, int],
    enclosure: Enclosure,
    extra: Mapping[str, str] | None,
    imports: Sequence[str],
    nursery: Nursery | None,
) -> Child:
    if nursery is not None:
        assert extra is None, "a process that has begun keeps its environment"
        return nursery.fork("", ",".join(imports), pass_fds=fds)
    is_tied = threading.current_thread() is threading.main_thread()
    told = (os.getpid(), "tied" if is_tied else "free", ",".join(imports), *fds)
    return spawn(
        [sys.executable, "-P", str(FRESH), *map(str, told)],
        environment=enclosure.environment(extra),
        folder=enclosure.work,
        pass_fds=fds,
    )


def prewarm(
    enclosure: Enclosure,
    *,
    imports: Sequence[str] = FOR_SCRIPTS,
    nursery: Nursery | None = None,
) -> FreshProcess:
    """Begin to start a process for a script that is to run later."""
    return FreshProcess(enclosure, imports=imports, nursery=nursery)


def run_script(
    path: str | os.PathLike[str],
    *,
    enclosure: Enclosure,
    timeout_s: float,
    arguments: Sequence[str] = (),
    extra: Mapping[str, str] | None = None,
    warm: FreshProcess | None = None,
) -> ScriptResult:
    """Run a Python file as `python path` would, in a process of its own.

    `extra` is added to its environment. A process that `prewarm` gave saves the import of torch.
    """
    assert warm is None or extra is None, "a process that has begun keeps its environment"
    fresh = warm or FreshProcess(enclosure, extra=extra)
    return fresh.run(Path(path), timeout_s=timeout_s, arguments=arguments)


def _describe(child: Child, *, has_ended: bool) -> ScriptResult:
    code = child.exit_code
    if not has_ended or code is None:
        return ScriptResult(None, child.output, is_timeout=True)
    if code < 0:
        return ScriptResult(None, child.output, signal=name_signal(-code))
    return ScriptResult(code, child.output)


def _close(*fds: int) -> None:
    for fd in fds:
        os.close(fd)
